"""The section ``environments``: what contradicts it is refused at load, by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from easyrl.config import Config, ConfigError
from easyrl.config.file import validate_config


def config(folder: Path, **sections: Any) -> Config:
    file = folder / "game.py"
    file.write_text("async def rollout(client, prompt):\n    return 1.0\n")
    return validate_config(
        {
            "model": {"path": "m"},
            "data": {"files": ["d.jsonl"]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "environments": [{"name": "game", "file": str(file)}],
            **sections,
        }
    )


@pytest.mark.parametrize("key, value", [("on_reward_error", "zero"), ("max_reward_retries", 5)])
def test_how_rewards_fail_has_no_effect_beside_environments(tmp_path: Path, key: str, value: Any):
    assert config(tmp_path).environments[0].on_failure == "mask"
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, scoring={key: value})
    said = str(caught.value)
    assert f"scoring.{key}: has no effect beside environments" in said
    assert "environments[0].on_failure" in said
