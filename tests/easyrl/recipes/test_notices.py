"""What a run says at its start of recipes without a ratio, and of those that do not stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from easyrl.config.file import load_config
from easyrl.recipes.loading import load_recipe, notices

MINIMAL = """
model: {path: models/tiny}
data: {files: [train.jsonl]}
inference: {endpoints: ["http://127.0.0.1:8000"]}
rewards: [{name: exact}]
"""


def said_at_start(folder: Path, *overrides: str) -> list[str]:
    path = folder / "config.yaml"
    path.write_text(MINIMAL)
    config = load_config(path, overrides)
    return notices(config, load_recipe(config))


@pytest.mark.parametrize("name", ["rloo", "online_dpo", "rpo"])
def test_later_updates_without_a_ratio_are_said(tmp_path: Path, name: str) -> None:
    wanted = f"trainer.updates_per_batch: recipe {name} has no ratio to the old policy"
    said = said_at_start(tmp_path, f"recipe.name={name}", "trainer.updates_per_batch=2")
    (notice,) = [each for each in said if each.startswith(wanted)]
    assert "off-policy and not corrected" in notice
    said = said_at_start(tmp_path, f"recipe.name={name}")
    said += said_at_start(tmp_path, "recipe.name=grpo", "trainer.updates_per_batch=2")
    assert not [each for each in said if "has no ratio" in each]


def test_a_run_that_does_not_stream_says_what_that_costs(tmp_path: Path) -> None:
    said = said_at_start(tmp_path, "recipe.name=gdpo")
    (notice,) = [each for each in said if "does not stream" in each]
    assert "generation plus training (time/wait_s and time/train_s)" in notice
