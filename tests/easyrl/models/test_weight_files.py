"""Weights that are not there, not whole or of other shapes are named before or as they are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from easyrl.config import ConfigError, ModelConfig
from easyrl.models.loading import load_policy_model
from easyrl.models.supported import vocabulary_size
from easyrl.models.weight_files import INDEX, SINGLE, check_weight_files
from tests.tiny_models import save_tiny_model

SHARD = "model-00001-of-00002.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("good") / "model", "qwen3")


@pytest.fixture
def model(good, tmp_path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def index_of(folder: Path, content: object) -> None:
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps(content))


def cut(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[: len(content) // 2])


def shards(folder: Path) -> None:
    (folder / SINGLE).rename(folder / SHARD)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": SHARD}}))


BROKEN = {
    "none": (lambda f: (f / SINGLE).unlink(), rf"has no {SINGLE} and no {INDEX}"),
    "cut off": (cut, rf"{SINGLE} is damaged"),
    "empty": (lambda f: (f / SINGLE).write_bytes(b""), rf"{SINGLE} is damaged"),
    "a pointer": (lambda f: (f / SINGLE).write_bytes(POINTER), "is a pointer of git-lfs"),
    "a shard is missing": (lambda f: index_of(f, {"weight_map": {"a": SHARD}}), "is missing"),
    "the index is a list": (lambda f: index_of(f, []), rf"{INDEX} is damaged"),
    "the index has no map": (lambda f: index_of(f, {}), rf"{INDEX} is damaged"),
}


def test_whole_ones_pass(model):
    check_weight_files(model)
    shards(model)
    check_weight_files(model)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_ones_are_named(model, name):
    break_it, message = BROKEN[name]
    break_it(model)
    with pytest.raises(ConfigError, match=rf"model\.path: .*{message}.*; fetch the model again"):
        check_weight_files(model)


def test_weights_of_other_shapes_than_the_configuration_says(model):
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"intermediate_size": 100}))
    expected = r"model\.path: .* is \[.*48.*\], its config.json says \[.*100.*\]; give the"
    with pytest.raises(ConfigError, match=expected):
        load_policy_model(ModelConfig(path=model, dtype="fp32"))


UNREADABLE = [
    "[]",
    "3",
    "{",
    '{"model_type": "qwen9"}',
    '{"model_type": "qwen3", "vocab_size": "many"}',
    '{"model_type": "llama", "num_attention_heads": 0}',
]


@pytest.mark.parametrize("read", [load_policy_model, vocabulary_size])
@pytest.mark.parametrize("text", UNREADABLE)
def test_a_config_json_that_cannot_be_read_is_one_sentence(model, text, read):
    (model / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^model\.path: [^\n]*; give a folder with config.json"):
        read(ModelConfig(path=model, dtype="fp32"))


def test_a_model_without_a_vocabulary_is_named(model):
    (model / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match=r"^model\.path: .* no vocab_size in its config.json"):
        vocabulary_size(ModelConfig(path=model, dtype="fp32"))
