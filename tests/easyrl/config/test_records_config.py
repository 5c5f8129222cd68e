"""The configuration of a run on records: what it needs, and what of rollouts it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from easyrl.config import ConfigError
from easyrl.config.file import dump_config, load_config, validate_config
from easyrl.config.records import OF_ROLLOUTS, RecordsConfig
from easyrl.recipes.loading import BUILT_IN, load_recipe, run_settings, with_whole_recipe
from tests.recipes import REQUIRED

ROOT = Path(__file__).resolve().parents[3]
MINIMAL = """
source: records
model: {path: models/tiny}
data: {files: [train.jsonl]}
"""


def load(tmp_path: Path, text: str = MINIMAL, *overrides: str) -> RecordsConfig:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    config = load_config(file, overrides)
    assert isinstance(config, RecordsConfig)
    return config


def test_it_needs_no_endpoints_and_no_rewards(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.recipe.name == "sft" and config.rewards == []
    assert config.inference.endpoints == [] and config.inference.launch is None


def test_it_survives_a_dump_without_the_sections_of_rollouts(tmp_path: Path) -> None:
    config = with_whole_recipe(load(tmp_path, MINIMAL, "recipe={name: dpo, beta: 0.3}"))
    text = dump_config(config)
    assert not [s for s in OF_ROLLOUTS if f"\n{s}:" in text] and "label_smoothing: 0.0" in text
    assert load(tmp_path, text) == config


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_ready_file_loads_and_survives_a_dump(tmp_path: Path, kind: str) -> None:
    config = load_config(ROOT / "configs" / "recipes" / f"{kind}.yaml")
    assert isinstance(config, RecordsConfig) and config.recipe.name == config.run.name == kind
    assert type(load_recipe(config)) is BUILT_IN[kind]
    assert config.evaluation is not None
    assert load(tmp_path, dump_config(config)) == config


SECTIONS = {
    "rollout": "rollout={max_tokens: 3}",
    "inference": "inference={endpoints: [http://h:1]}",
    "rewards": "rewards=[{name: math}]",
    "scoring": "scoring={num_workers: 1}",
    "weight_sync": "weight_sync={prove: false}",
    "journal": "journal={keep: all}",
    "alarms": "alarms={window: 3}",
    "critic": "critic={learning_rate: 1e-5}",
    "samples": "samples={per_step: 1}",
}
REFUSED = {
    **{
        section: (key, f"  {section}: has no effect with source")
        for section, key in SECTIONS.items()
    },
    "sync": ("run.mode=sync", "run.mode: sync has no effect with source: records"),
    "updates": ("trainer.updates_per_batch=2", "trainer.updates_per_batch: 2 has no effect"),
    "old policy": ("trainer.old_policy=lagged", "trainer.old_policy: lagged has no effect"),
    "draws": ("trainer.max_draws_per_batch=99", "trainer.max_draws_per_batch: 99 has no effect"),
    "look-ahead": ("trainer.look_ahead=false", "trainer.look_ahead: False has no effect"),
    "prompt length": ("data.max_prompt_tokens=9", "data.max_prompt_tokens: has no effect"),
    "exclusions": ("data.max_excluded=0.1", "data.max_excluded: has no effect"),
    "pattern": ("data.answer_pattern=(x)", "data.answer_pattern: has no effect"),
    "number of samples": (
        "evaluation={data: {files: [h.jsonl]}, num_samples: 2}",
        "evaluation.num_samples: has no effect",
    ),
    "named sets": (
        "evaluation={aime24: {data: {files: [h.jsonl]}}}",
        "evaluation.aime24: unknown key; known keys: at_end, at_start, data",
    ),
    "mistyped": ("data.max_tokn=9", "data.max_tokn: unknown key; did you mean 'max_tokens'?"),
    "format": ("data.format=chat", "data.format: Input should be 'auto', 'messages'"),
    "a recipe of rollouts": (
        "recipe.name=grpo",
        "recipe.name: grpo trains on rollouts, the run is",
    ),
    "beta": ("recipe={name: dpo, beta: 0}", "recipe.beta: Input should be greater than 0"),
    "smoothing": (
        "recipe={name: dpo, label_smoothing: 0.5}",
        "recipe.label_smoothing: Input should be less than 0.5",
    ),
}


def test_every_section_of_rollouts_is_tried() -> None:
    assert SECTIONS.keys() == OF_ROLLOUTS.keys()


@pytest.mark.parametrize(("override", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_effect_is_refused(tmp_path: Path, override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe(load(tmp_path, MINIMAL, override))
    assert problem in str(refused.value)


def test_recipes_of_records_are_refused_in_a_run_on_rollouts() -> None:
    tree = {
        "model": {"path": "m"},
        "data": {"files": ["a.jsonl"]},
        "inference": {"endpoints": ["http://h:1"]},
        "rewards": [{"name": "math"}],
    }
    for name, cls in BUILT_IN.items():
        recipe = {"name": name} | REQUIRED.get(name, {})
        config = validate_config(tree | {"recipe": recipe})
        if cls.source == "rollouts":
            load_recipe(config)
            continue
        with pytest.raises(ConfigError, match=f"{name} trains on records.*set source: records"):
            load_recipe(config)


def test_defaults_of_a_command_yield_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(MINIMAL)
    assert load_config(file, defaults={"recipe": {"name": "dpo"}}).recipe.name == "dpo"
    file.write_text(MINIMAL + "recipe: {name: sft}\n")
    assert load_config(file, defaults={"recipe": {"name": "dpo"}}).recipe.name == "sft"


def test_what_a_recipe_is_told(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "data.max_tokens=77")
    assert (run_settings(config).max_tokens, run_settings(config).num_generations) == (77, 1)
    pairs = load(tmp_path, MINIMAL, "recipe.name=dpo")
    assert run_settings(pairs).num_generations == 2
