"""``auto`` of packing and attention decided by the models, and what cannot be had refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from easyrl.build.recipe import group_functions
from easyrl.build.row_settings import decide_row_settings
from easyrl.config import Config, ConfigError
from easyrl.config.file import validate_config
from tests.any_models import save_any_model
from tests.tiny_models import save_tiny_model


def config(
    model: Path, *, packing: str = "auto", attention: str = "auto", **more: dict[str, Any]
) -> Config:
    sections = {
        "model": {"path": str(model), "dtype": "fp32", "attention": attention},
        "data": {"files": ["prompts.jsonl"], "max_prompt_tokens": 100},
        "rollout": {"max_tokens": 20, "num_generations": 4},
        "inference": {"endpoints": ["http://127.0.0.1:1"]},
        "rewards": [{"name": "exact"}],
        "trainer": {"zero_stage": 0, "packing": packing},
    }
    return validate_config(sections | {k: sections.get(k, {}) | v for k, v in more.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("gpt2", "short_windows", "mistral"):
        save_any_model(folder / name, name)
    save_tiny_model(folder / "qwen3", "qwen3")
    return folder


@pytest.mark.parametrize(
    ("name", "packing", "attention", "decided"),
    [
        ("qwen3", "auto", "auto", ("prompt", "auto")),
        ("gpt2", "auto", "auto", ("prompt", "auto")),
        ("gpt2", "tree", "merged", ("tree", "merged")),
        ("gpt2", "none", "merged", ("none", "merged")),
        ("gpt2", "auto", "own", ("none", "own")),
        ("mistral", "auto", "auto", ("prompt", "auto")),  # sequences fit into its window
        ("short_windows", "auto", "auto", ("none", "own")),
        ("short_windows", "none", "auto", ("none", "own")),
    ],
)
def test_decided(
    folder: Path, name: str, packing: str, attention: str, decided: tuple[str, str]
) -> None:
    given = config(folder / name, packing=packing, attention=attention)
    result, said = decide_row_settings(given)
    assert (result.trainer.packing, result.model.attention) == decided
    assert decide_row_settings(result)[0] == result  # as a run that is resumed reads it
    if name == "short_windows" and packing == "auto":
        (notice,) = said
        assert "its sliding window of 8 tokens is shorter than the longest sequence, 120" in notice
        assert "4 times instead of once" in notice and "up to 2.7 times the tokens" in notice
    else:
        assert said == []
    assert group_functions(result) is not None


@pytest.mark.parametrize("packing", ["prompt", "tree"])
def test_a_packing_that_cannot_be_had(folder: Path, packing: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.packing: {packing} cannot.*window.*use none"):
        decide_row_settings(config(folder / "short_windows", packing=packing))


def test_an_attention_that_cannot_be_had(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.attention: merged cannot be had.*use auto"):
        decide_row_settings(config(folder / "short_windows", attention="merged"))


@pytest.mark.parametrize("packing", ["prompt", "tree"])
def test_own_attention_shares_nothing(folder: Path, packing: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.packing: .*model\.attention=own"):
        config(folder / "gpt2", packing=packing, attention="own")


def test_a_teacher_is_asked_too(folder: Path) -> None:
    recipe = {"name": "distillation", "teacher": str(folder / "short_windows")}
    result, (notice,) = decide_row_settings(config(folder / "gpt2", recipe=recipe))
    assert (result.trainer.packing, result.model.attention) == ("none", "own")
    assert str(folder / "short_windows") in notice


def test_layers_one_by_one_are_of_known_architectures(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.offload_reference: a GPT2LMHeadModel"):
        decide_row_settings(config(folder / "gpt2", trainer={"offload_reference": True}))


def test_a_split_model_has_an_architecture_of_ours(folder: Path) -> None:
    split: dict[str, Any] = {"parallel": {"tensor": 2}, "trainer": {"zero_stage": 1}}
    with pytest.raises(ConfigError, match=r"model\.path: .*GPT2LMHeadModel, which cannot be split"):
        decide_row_settings(config(folder / "gpt2", **split))
    assert decide_row_settings(config(folder / "qwen3", **split))[0].trainer.packing == "prompt"
