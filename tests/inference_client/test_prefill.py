"""Prompts' keys and values without what only logits depend on, against a whole forward."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from easyrl.inference_client.servers.embedded.prefill import (
    PromptCache,
    compute_states,
    states_of_layers,
)
from tests.tiny_models import FAMILIES, VOCAB_SIZE, Family, tiny_model

LENGTH = 23


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    family: Family = request.param
    return tiny_model(family, seed=3)


def prompts(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCAB_SIZE, (count, LENGTH), generator=generator)


@torch.no_grad()
def whole_forward(
    model: PreTrainedModel, tokens: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cache = DynamicCache()
    model(input_ids=tokens, past_key_values=cache, use_cache=True)
    return list(states_of_layers(cache))


def assert_same(cache: PromptCache, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    found = list(states_of_layers(cache))
    assert len(found) == len(expected) > 1
    for own, whole in zip(found, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(own, whole, strict=True))


def test_states_are_those_of_a_whole_forward(model: PreTrainedModel) -> None:
    tokens = prompts(3)
    cache = PromptCache(model)
    compute_states(model, tokens, cache)
    assert_same(cache, whole_forward(model, tokens))


def test_pieces_go_on_with_what_is_there(model: PreTrainedModel) -> None:
    tokens = prompts(1)
    cache = PromptCache(model)
    for piece in (slice(0, 9), slice(9, LENGTH)):
        compute_states(model, tokens[:, piece], cache)
    for own, whole in zip(states_of_layers(cache), whole_forward(model, tokens), strict=True):
        for pair in zip(own, whole, strict=True):
            torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5)


def test_the_last_layer_does_not_go_beyond_its_keys_and_values(model: PreTrainedModel) -> None:
    ended: set[str] = set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ended.add(name))
    compute_states(model, prompts(1), PromptCache(model))
    assert {"model.layers.0", "model.layers.0.mlp", "model.layers.1.self_attn.k_proj"} <= ended
    assert not ended & {"model.layers.1.self_attn.o_proj", "model.layers.1.mlp", "model.norm"}


def test_where_the_last_layer_keeps_nothing_the_forward_runs_to_its_end(
    model: PreTrainedModel,
) -> None:
    tokens = prompts(1)
    cache = PromptCache(model)
    cache._last += 1  # as of a model whose last layer uses the one before it
    ended: list[str] = []
    model.base_model.register_forward_hook(lambda *_: ended.append("base"))
    compute_states(model, tokens, cache)
    assert ended == ["base"]
    assert_same(cache, whole_forward(model, tokens))
