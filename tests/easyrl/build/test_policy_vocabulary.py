"""Ids that end a sequence: no server heeds one that the policy's vocabulary does not have."""

from __future__ import annotations

import json

import pytest

from easyrl.build.tokenizer import load_tokenizer
from easyrl.build.vocabulary import policy_vocabulary
from easyrl.completion_check import Vocabulary
from easyrl.config import Config, ModelConfig
from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

GENERATION = "generation_config.json"
OF_TOKENIZER, OF_CONFIG = 5, 3  # ids of letters, and no others


@pytest.fixture
def folder(tmp_path):
    path = save_tiny_model(tmp_path / "model", "qwen3", eos_token_id=OF_CONFIG)
    save_tokenizer(path, OF_TOKENIZER)
    return path


def save_tokenizer(path, end_id):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_id)
    tokenizer.save_pretrained(path)


def vocabulary(path, **model) -> Vocabulary:
    config = Config.model_construct(model=ModelConfig(path=path, **model))
    return policy_vocabulary(config, load_tokenizer(config))


def heeded(path) -> set[int]:
    """By the embedded server."""
    engine = EmbeddedEngine(path)
    try:
        return set(engine._eos_token_ids)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "generation, end_ids",
    [
        ({"eos_token_id": 7}, {3, 5, 7}),
        ({"eos_token_id": [7, 9, 5]}, {3, 5, 7, 9}),  # as Llama 3 and Qwen3 have several
        ({}, {3, 5}),
        (None, {3, 5}),  # no such file: servers make one of config.json
    ],
)
def test_all_that_tokenizer_and_model_name(folder, generation, end_ids):
    if generation is None:
        (folder / GENERATION).unlink()
    else:
        (folder / GENERATION).write_text(json.dumps(generation))
    assert vocabulary(folder) == Vocabulary(VOCAB_SIZE, frozenset(end_ids))
    assert heeded(folder) <= end_ids


def test_a_tokenizer_elsewhere_and_the_one_that_servers_read(folder, tmp_path):
    (folder / GENERATION).unlink()
    other = tmp_path / "tokenizer"
    save_tokenizer(other, 11)
    assert vocabulary(folder, tokenizer=other).end_ids == {OF_CONFIG, OF_TOKENIZER, 11}
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert vocabulary(folder, tokenizer=other).end_ids == {OF_CONFIG, 11}
    assert heeded(folder) == {OF_CONFIG}


def test_a_model_without_an_end(folder):
    (folder / GENERATION).unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["eos_token"] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert vocabulary(folder).end_ids == frozenset()
    for nonsense in ('{"eos_token_id": "end"}', '{"eos_token_id": [null, "7"]}', "{"):
        (folder / GENERATION).write_text(nonsense)
        assert vocabulary(folder).end_ids == frozenset()
