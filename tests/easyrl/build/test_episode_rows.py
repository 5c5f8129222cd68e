"""What a run with environments packs as, and which recipes it can have"""

from __future__ import annotations

from pathlib import Path

import pytest

from easyrl.build.row_settings import sharing
from easyrl.config import Config, ConfigError
from easyrl.config.file import load_config
from easyrl.recipes.loading import load_recipe

MINIMAL = """
model: {path: models/tiny}
data: {files: [train.jsonl]}
inference: {endpoints: ["http://127.0.0.1:8000"]}
environments: [{name: game, openenv: "http://127.0.0.1:9000"}]
trainer: {max_steps: 3}
"""


def load(tmp_path: Path, *overrides: str, text: str = MINIMAL) -> Config:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return load_config(file, list(overrides))


def test_what_episodes_share_is_a_tree(tmp_path: Path) -> None:
    assert sharing(load(tmp_path)) == "tree"
    assert sharing(load(tmp_path, "trainer.packing=none")) == "none"
    without = load(tmp_path, "environments=[]", "rewards=[{name: exact}]")
    assert sharing(without) == "prompt"


def test_the_environment_rewards_and_is_one_reward(tmp_path: Path) -> None:
    assert load_recipe(load(tmp_path, "recipe.name=turn_grpo")).uses_rewards
    for settings in ("recipe.name=gdpo", "recipe.advantage=each_reward_std"):
        with pytest.raises(ConfigError, match="an episode has one, its environment's"):
            load_recipe(load(tmp_path, settings))


def test_rewards_that_nobody_would_ask_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rewards: would not be asked"):
        load(tmp_path, "rewards=[{name: exact}]")


def test_held_out_episodes_are_rewarded_by_their_environment(tmp_path: Path) -> None:
    held_out = "evaluation={data: {files: [test.jsonl]}, every_steps: 1}"
    assert load(tmp_path, held_out).evaluation is not None
    with pytest.raises(ConfigError, match="without rewards; add one, or environments"):
        load(tmp_path, held_out, "environments=[]", "recipe.name=distillation")
