"""Presets: what the publications state is set, the user's values win, a dump needs no preset."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from easyrl.config import Config, ConfigError, presets
from easyrl.config.file import dump_config, load_config, resolve_config, validate_config
from easyrl.config.presets import Preset, preset_names, read_preset, written
from easyrl.recipes.loading import BUILT_IN, load_recipe, notices, with_whole_recipe
from tests.recipes import REQUIRED

ROOT = Path(__file__).resolve().parents[3]
MINIMAL: dict[str, Any] = {
    "model": {"path": "models/tiny"},
    "data": {"files": ["train.jsonl"]},
    "inference": {"endpoints": ["http://127.0.0.1:8000"]},
    "rewards": [{"name": "exact"}],
}
# Copied from the publications, not from the files: INTELLECT-2 §4.1, Llama-Nemotron §5.1, §6.2,
# DeepSeek-R1 v2 §2.1, DAPO §4.1, Dr. GRPO table 6, GSPO §5.1.
STATED: dict[str, dict[str, Any]] = {
    "intellect2": {
        "recipe.name": "two_sided",
        "recipe.clip_eps_low": 0.2,
        "recipe.clip_eps_high": 0.2,
        "recipe.delta": 4,
        "recipe.entropy_coef": 1e-4,
        "recipe.kl_coef": 0.001,
        "recipe.aggregation": "token",
        "recipe.dynamic_sampling": True,
        "trainer.max_grad_norm": 0.1,
        "trainer.learning_rate": 3e-7,
    },
    "llama_nemotron_reasoning": {
        "recipe.name": "grpo",
        "rollout.temperature": 1,
        "rollout.top_p": 1,
    },
    "llama_nemotron_rlhf": {
        "recipe.name": "rpo",
        "recipe.beta": 1e-5,
        "recipe.reward_scale": 3,
        "trainer.learning_rate": 4e-7,
    },
    "deepseek_r1_zero": {
        "recipe.name": "grpo",
        "recipe.kl_coef": 0.001,
        "recipe.kl_estimator": "k3",
        "recipe.advantage": "group_std",
        "trainer.learning_rate": 3e-6,
        "rollout.temperature": 1,
    },
    "dapo": {
        "recipe.name": "dapo",
        "recipe.clip_eps_low": 0.2,
        "recipe.clip_eps_high": 0.28,
        "recipe.overlong_buffer": 4096 / 20480,
        "recipe.overlong_penalty": 1,
        "recipe.kl_coef": 0,
        "recipe.advantage": "group_std",
        "recipe.aggregation": "token",
        "recipe.dynamic_sampling": True,
        "trainer.learning_rate": 1e-6,
        "trainer.lr_schedule": "constant",
    },
    "dr_grpo": {
        "recipe.name": "dr_grpo",
        "recipe.advantage": "group_mean",
        "recipe.aggregation": "constant",
        "recipe.clip_eps_low": 0.2,
        "recipe.clip_eps_high": 0.2,
        "recipe.kl_coef": 0,
        "recipe.kl_in_reward_coef": 0,
        "trainer.learning_rate": 1e-6,
        "trainer.lr_schedule": "constant",
        "trainer.adam_betas": [0.9, 0.95],
        "trainer.weight_decay": 0,
        "trainer.max_grad_norm": 1,
        "rollout.temperature": 1,
        "rollout.top_p": 1,
        "rollout.top_k": -1,
    },
    "gspo": {
        "recipe.name": "gspo",
        "recipe.clip_eps_low": 3e-4,
        "recipe.clip_eps_high": 4e-4,
        "recipe.advantage": "group_std",
        "recipe.aggregation": "sequence",
    },
}
SIZES: dict[str, dict[str, Any]] = {
    "intellect2": {
        "trainer.batch_size": 256,
        "rollout.num_generations": 16,
        "trainer.updates_per_batch": 256 * 16 // 512,
        "trainer.warmup_steps": 25,
    },
    "llama_nemotron_reasoning": {
        "trainer.batch_size": 72,
        "rollout.num_generations": 16,
        "trainer.updates_per_batch": 72 * 16 // 576,
    },
    "llama_nemotron_rlhf": {"trainer.batch_size": 64, "trainer.max_steps": 500},
    "deepseek_r1_zero": {
        "trainer.batch_size": 8192 // 16,
        "rollout.num_generations": 16,
        "trainer.updates_per_batch": 8192 // 512,
        "trainer.max_steps": 10_400,
        "rollout.max_tokens": 32_768,
    },
    "dapo": {
        "trainer.batch_size": 512,
        "rollout.num_generations": 16,
        "trainer.updates_per_batch": 512 * 16 // 512,
        "trainer.warmup_steps": 20 * 16,
        "rollout.max_tokens": 16_384 + 4_096,
    },
    "dr_grpo": {"rollout.num_generations": 8, "rollout.max_tokens": 3000},
    "gspo": {"trainer.updates_per_batch": 4},
}


def load(recipe: dict[str, Any] | str, **sections: Any) -> Config:
    """A minimal configuration with this recipe, or a preset's name."""
    section = {"name": recipe} if isinstance(recipe, str) else recipe
    return validate_config(MINIMAL | sections | {"recipe": section})


def at(config: Config, path: str) -> Any:
    section, _, key = path.partition(".")
    tree = config.model_dump(mode="json")[section]
    return tree[key] if key else tree


@pytest.fixture
def no_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "FOLDER", tmp_path / "none")
    assert preset_names() == []


# ---- what is set ---------------------------------------------------------------------------------


def test_every_preset_has_its_stated_values_here() -> None:
    assert set(preset_names()) == set(STATED) == set(SIZES)
    for name in preset_names():
        preset = read_preset(name)
        assert {"recipe.name", *preset.settings} == set(STATED[name])
        told = {path: p.value for path, p in preset.size_and_task.items() if "." in path}
        told.pop("data.template_values", None)
        assert told == SIZES[name]


@pytest.mark.parametrize("name", STATED)
def test_a_preset_sets_what_its_publication_states(name: str) -> None:
    config = load(name)
    assert {path: at(config, path) for path in STATED[name]} == STATED[name]
    recipe = load_recipe(config)
    assert type(recipe) is BUILT_IN[STATED[name]["recipe.name"]]
    for path, value in STATED[name].items():
        if path.startswith("recipe.") and path != "recipe.name":
            assert getattr(recipe, path.removeprefix("recipe.")) == value


@pytest.mark.parametrize("name", STATED)
def test_a_preset_leaves_all_else_at_its_default(name: str) -> None:
    """Sizes and tasks among it."""
    preset = read_preset(name)
    with_it = with_whole_recipe(load(name)).model_dump(mode="json")
    without = with_whole_recipe(load(preset.algorithm)).model_dump(mode="json")
    sections = ("run", "model", "data", "rollout", "inference", "scoring", "trainer", "recipe")
    differing = {
        f"{section}.{key}"
        for section in sections
        for key, value in without[section].items()
        if with_it[section][key] != value
    }
    assert differing <= set(preset.settings)
    assert with_it["rewards"] == without["rewards"]


@pytest.mark.parametrize("name", [name for name in STATED if name in BUILT_IN])
def test_a_preset_called_as_its_algorithm_has_the_defaults_of_the_class(name: str) -> None:
    """So that the class, used from Python, is the published objective too."""
    preset = read_preset(name)
    assert preset.algorithm == name
    defaults = asdict(BUILT_IN[name]())
    stated = {path.removeprefix("recipe."): p.value for path, p in preset.settings.items()}
    assert {k: v for k, v in stated.items() if k in defaults} == {
        k: defaults[k] for k in stated if k in defaults
    }


@pytest.mark.parametrize("name", STATED)
def test_a_preset_runs_at_its_published_size(name: str) -> None:
    """All that it tells of has a key, a type and a value that go together."""
    tree = OmegaConf.create(MINIMAL | {"recipe": {"name": name}})
    for path, published in read_preset(name).size_and_task.items():
        OmegaConf.update(tree, path, published.value, merge=False)
    if "template_values" in tree.data:
        tree.data.prompt_template = "{prompt}\n\nThink for {target_tokens} tokens."
    config = resolve_config(tree, "published")
    assert {path: at(config, path) for path in SIZES[name]} == SIZES[name]
    said = notices(config, load_recipe(config))
    assert not [notice for notice in said if "published" in notice or "the run that" in notice]


# ---- the user's values ---------------------------------------------------------------------------


def test_the_user_s_values_win_in_every_section() -> None:
    config = load(
        {"name": "intellect2", "delta": 8.0},
        trainer={"learning_rate": 1e-4, "batch_size": 12},
        rollout={"num_generations": 4},
    )
    recipe = load_recipe(config)
    assert (recipe.delta, recipe.entropy_coef) == (8.0, 1e-4)  # type: ignore[attr-defined]
    assert (config.trainer.learning_rate, config.trainer.max_grad_norm) == (1e-4, 0.1)
    assert (config.trainer.batch_size, config.rollout.num_generations) == (12, 4)


def test_a_value_that_is_a_default_wins_too() -> None:
    config = load("intellect2", trainer={"learning_rate": 1e-6, "max_grad_norm": 0.0})
    assert (config.trainer.learning_rate, config.trainer.max_grad_norm) == (1e-6, 0.0)


def test_the_command_line_wins_and_may_name_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(MINIMAL | {"recipe": {"kl_coef": 0.5}})))
    config = load_config(file, ["recipe.name=intellect2", "trainer.max_grad_norm=2.0"])
    assert (config.recipe.name, config.recipe.settings["delta"]) == ("two_sided", 4.0)
    assert config.recipe.settings["kl_coef"] == 0.5 and config.trainer.max_grad_norm == 2.0
    config = load_config(file, ["recipe={name: intellect2}"])
    assert config.recipe.settings["kl_coef"] == 0.001 and config.trainer.max_grad_norm == 0.1


def test_from_python_as_from_a_file() -> None:
    config = resolve_config(OmegaConf.create(MINIMAL | {"recipe": {"name": "dr_grpo"}}), "api")
    assert config.trainer.adam_betas == (0.9, 0.95)


def test_what_the_user_gave_is_not_changed() -> None:
    given = MINIMAL | {"recipe": {"name": "intellect2"}, "trainer": {"batch_size": 8}}
    validate_config(given)
    assert given["recipe"] == {"name": "intellect2"} and given["trainer"] == {"batch_size": 8}


def test_what_the_user_has_otherwise_is_said_once() -> None:
    config = load({"name": "intellect2", "kl_coef": 0.0}, trainer={"learning_rate": 1e-4})
    said = [each for each in notices(config, load_recipe(config)) if "published" in each]
    assert said == [
        "recipe.name: the published intellect2 has recipe.kl_coef=0.001 (here 0.0), "
        "trainer.learning_rate=3.0e-07 (here 0.0001); the values set here count"
    ]


def test_what_a_preset_does_not_set_is_said_once() -> None:
    config = load("intellect2", trainer={"batch_size": 256, "updates_per_batch": 8})
    assert notices(config, load_recipe(config)) == [
        "recipe.name: the run that intellect2 is of (INTELLECT-2, arXiv 2505.07291) had "
        "trainer.warmup_steps=25 (here 0), rollout.num_generations=16 (here 8), rewards, "
        "data.template_values; the name does not set these, as they belong to that run's size and "
        "task: `easyrl recipes intellect2` prints them all"
    ]


def test_a_clip_that_cannot_act_under_a_preset_is_a_notice() -> None:
    config = load("intellect2")
    said = notices(config, load_recipe(config))
    assert any("clip_eps_low and clip_eps_high and delta cannot act" in each for each in said)


def test_without_a_preset_nothing_is_said_of_one() -> None:
    of_rollouts = {name for name, recipe in BUILT_IN.items() if recipe.source == "rollouts"}
    for name in sorted(of_rollouts - set(preset_names())):
        config = load({"name": name} | REQUIRED.get(name, {}))
        said = notices(config, load_recipe(config))
        assert not [notice for notice in said if "published" in notice or "the run that" in notice]


# ---- the run's own configuration -----------------------------------------------------------------


@pytest.mark.parametrize("name", STATED)
def test_a_dump_is_whole_and_needs_no_preset(
    tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    whole = with_whole_recipe(load(name, trainer={"learning_rate": 5e-5}))
    dumped = dump_config(whole)
    file = tmp_path / "config.yaml"
    file.write_text(dumped)
    keys = {f.name for f in fields(BUILT_IN[whole.recipe.name])}
    assert set(whole.recipe.settings) == keys and whole.recipe.name in BUILT_IN
    assert dump_config(with_whole_recipe(load_config(file))) == dumped
    request.getfixturevalue("no_presets")
    assert dump_config(with_whole_recipe(load_config(file))) == dumped


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [("intelect2", "'intellect2'"), ("llama_nemotron_reason", "'llama_nemotron_reasoning'")],
)
def test_an_unknown_name_suggests_close_ones(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(load(name))
    message = str(caught.value)
    assert message.startswith(f"recipe.name: no built-in recipe is called {name!r}; did you mean")
    assert meant in message.partition("There are")[0]
    assert all(each in message.partition("There are")[2] for each in [*BUILT_IN, *preset_names()])


def test_a_name_like_no_other_is_told_all() -> None:
    with pytest.raises(
        ConfigError, match="called 'xyzzy'; there are grpo, .*, as presets deepseek"
    ):
        load_recipe(load("xyzzy"))


def test_a_name_is_no_path() -> None:
    with pytest.raises(ConfigError, match="no built-in recipe is called"):
        load_recipe(load("../presets/dapo"))


def test_a_class_of_the_user_s_may_be_called_as_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("from easyrl.recipes import GRPO\n\nintellect2 = GRPO\n")
    config = load({"name": "intellect2", "file": str(file)})
    assert config.recipe.name == "intellect2" and config.trainer.max_grad_norm == 1.0
    assert config.recipe.settings == {}


def test_an_unknown_key_is_refused_as_the_algorithm_s() -> None:
    with pytest.raises(ConfigError, match=r"recipe\.overlong_buffer: unknown key of recipe two_s"):
        load_recipe(load({"name": "intellect2", "overlong_buffer": 0.1}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trainer": 3}, "trainer: Input should be a valid dictionary"),
        ({"trainer": {"batchsize": 3}}, "trainer.batchsize: unknown key; did you mean"),
        ({"recipe": "intellect2"}, "recipe: Input should be a valid dictionary"),
        ({"recipe": {"name": ["intellect2"]}}, "recipe.name: Input should be a valid string"),
    ],
)
def test_what_is_wrong_is_said_as_without_a_preset(values: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config(MINIMAL | {"recipe": {"name": "intellect2"}} | values)
    assert message in str(caught.value)


# ---- the files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STATED)
def test_a_file_s_keys_are_the_configuration_s(name: str) -> None:
    preset = read_preset(name)
    whole = with_whole_recipe(load(name)).model_dump(mode="json")
    for path in (*preset.settings, *preset.size_and_task, *preset.not_stated):
        section, _, key = path.partition(".")
        assert key in whole[section] if key else path == "rewards"
    assert set(preset.settings).isdisjoint(preset.size_and_task)
    assert set(preset.not_stated).isdisjoint({**preset.settings, **preset.size_and_task})


@pytest.mark.parametrize("given", [{"value": 0.2}, {"value": 0.2, "source": ""}, 0.2])
@pytest.mark.parametrize("part", ["settings", "size_and_task"])
def test_a_value_without_a_source_is_refused(part: str, given: Any) -> None:
    whole = read_preset("dapo").model_dump()
    Preset.model_validate(whole)
    with pytest.raises(ValidationError, match=part):
        Preset.model_validate(whole | {part: {"trainer.learning_rate": given}})


# ---- the documentation ---------------------------------------------------------------------------


def documented(name: str) -> str:
    """The row of docs/recipes.md that a file stands for."""
    preset = read_preset(name)

    def told(published: dict[str, presets.Published]) -> str:
        by_source: dict[str, list[str]] = {}
        for path, setting in published.items():
            by_source.setdefault(setting.source, []).append(f"`{path}: {written(setting.value)}`")
        return "; ".join(f"{', '.join(keys)} ({source})" for source, keys in by_source.items())

    open_keys = ", ".join(f"`{path}`" for path in preset.not_stated)
    link = f"{preset.paper}, [{preset.arxiv}](https://arxiv.org/abs/{preset.arxiv})"
    cells = (
        f"`{name}`, of `{preset.algorithm}`" if name != preset.algorithm else f"`{name}`",
        link,
        told(preset.settings),
        told(preset.size_and_task),
        open_keys,
        "; ".join(preset.differences),
    )
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", STATED)
def test_the_documentation_has_what_the_file_has(name: str) -> None:
    assert documented(name) in (ROOT / "docs" / "recipes.md").read_text().splitlines()
