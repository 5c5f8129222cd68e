"""The last layer without the tokens that predict nothing: every value and gradient stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from easyrl.config import ModelConfig
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models import last_layer, policy_model, row_check
from easyrl.models.last_layer import LEAST_SHARE, SHORTEST, wanted_tokens
from easyrl.models.loading import load_policy_model
from easyrl.models.offload import OffloadedModel
from easyrl.models.policy_model import PolicyModel, run_micro_batch
from easyrl.models.row_check import row_verdict
from easyrl.models.row_forward import PackedForward
from easyrl.models.tri_model import frozen_model
from tests.any_models import PACKED, any_model, save_any_model
from tests.easyrl.models.test_any_model import no_casts as no_casts_anywhere
from tests.easyrl.models.test_policy_model import (
    TEMPERATURE,
    load_both,
    no_casts,
    pack,
    packed_run,
    relative_errors,
    separate_run,
)
from tests.kernels.forests import random_forest
from tests.tiny_models import FAMILIES, Family, save_tiny_model

__all__ = ["no_casts", "no_casts_anywhere"]  # fixtures

# Two prompts of which the last layer leaves out all but the last token, one that is too short.
SHAPES = ((70, [5, 17, 1, 9]), (3, [30, 2]), (45, [8, 8, 29]))
ONE_ROW = 400
WANTED = (1 + 5 + 17 + 1 + 9) + (3 + 30 + 2) + (1 + 8 + 8 + 29)
BOUND = 1e-9  # relative, in fp64; measured 1e-15 to 1e-14


def load(folder: Path, **settings_: object) -> PolicyModel:
    values = {"path": folder, "attention": "merged", "logprob_chunk_size": 16, "dtype": "fp32"}
    return load_policy_model(ModelConfig.model_validate(values | settings_), dtype=torch.float64)


def tokens_of_mlps(model: PolicyModel) -> list[int]:
    """How many tokens each layer's MLP gets, in the order of the calls from now on."""
    found: list[int] = []
    base: Any = model.model.base_model
    for layer in base.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: found.append(args[0].shape[1]))
    return found


@pytest.mark.parametrize(
    ("family", "budget"), [*((family, ONE_ROW) for family in FAMILIES), ("qwen3", 120)]
)
def test_exact_in_fp64_without_casts(
    tmp_path: Path, no_casts: None, family: Family, budget: int
) -> None:
    policy, plain = load_both(save_tiny_model(tmp_path, family), torch.float64)
    tokens = tokens_of_mlps(policy)
    errors = relative_errors(packed_run(policy, budget, SHAPES), separate_run(plain, SHAPES))
    assert max(errors) < BOUND, errors
    if budget == ONE_ROW:
        (row,) = pack(budget, SHAPES)
        assert set(tokens) == {row.num_tokens, WANTED}


@pytest.mark.parametrize("attention", ["reference", "padded", "merged", "flex"])
def test_every_backend_is_exact(attention: str, tmp_path: Path, no_casts: None) -> None:
    folder = save_tiny_model(tmp_path, "qwen3")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    policy = load(folder, attention=attention)
    errors = relative_errors(packed_run(policy, ONE_ROW, SHAPES), separate_run(plain, SHAPES))
    assert max(errors) < BOUND, errors


@pytest.mark.parametrize("name", PACKED)
def test_other_families(name: str, tmp_path: Path, no_casts_anywhere: None) -> None:
    folder = save_any_model(tmp_path, name)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    policy = load(folder, attention="reference")
    assert isinstance(policy.row_forward, PackedForward)
    got = packed_run(policy, ONE_ROW, SHAPES)
    assert max(relative_errors(got, separate_run(plain, SHAPES))) < BOUND
    policy.row_forward = PackedForward(policy.row_forward.attention)
    errors = relative_errors(got, packed_run(policy, ONE_ROW, SHAPES))
    assert max(errors) < BOUND, errors


@pytest.mark.parametrize("mode", ["layer", "selective"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_activation_checkpointing_changes_nothing(
    tmp_path: Path, family: Family, mode: str
) -> None:
    folder = save_tiny_model(tmp_path, family)
    plain = packed_run(load(folder), ONE_ROW, SHAPES)
    model = load(folder, activation_checkpointing=mode)
    tokens = tokens_of_mlps(model)
    run = packed_run(model, ONE_ROW, SHAPES)
    assert tokens.count(WANTED) == 2  # forward, and again in the backward pass
    assert torch.equal(run[0], plain[0])
    for name, gradient in run[1].items():
        assert torch.equal(gradient, plain[1][name]), name


def test_offloaded_models_give_the_same_bits(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "qwen3")
    rows = [(row, SegmentLayout(row.segments)) for row in pack(ONE_ROW, SHAPES)]
    plain, model = frozen_model(load(folder)), load(folder)
    tokens = tokens_of_mlps(model)
    got = OffloadedModel(model, torch.device("cpu")).logprobs(rows, TEMPERATURE)
    assert torch.equal(got[0], plain.logprobs(rows, TEMPERATURE)[0])
    assert tokens[-1] == WANTED


def test_sharded_models_run_their_whole_last_layer(tmp_path: Path) -> None:
    model = load(save_tiny_model(tmp_path, "qwen3"))
    next(model.model.parameters()).ds_id = 0  # type: ignore[attr-defined]  # as ZeRO-3 marks them
    tokens = tokens_of_mlps(model)
    (row,) = pack(ONE_ROW, SHAPES)
    run_micro_batch(model, row, TEMPERATURE)
    assert tokens == [row.num_tokens] * 2


@pytest.mark.parametrize("name", ["gpt2", "a layer that is not the last"])
def test_models_that_do_not_bear_it_run_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_casts: None
) -> None:
    """GPT-2's layers compute with the number of tokens that the model was given."""
    if name == "gpt2":
        folder = save_any_model(tmp_path, name)
        assert row_verdict(any_model(name).config).narrow is not None
    else:
        folder = save_tiny_model(tmp_path, "llama")
        row_check._verdict.cache_clear()
        monkeypatch.setattr(policy_model, "narrow_last_layer", narrow_first_layer)
    try:
        policy = load(folder)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        errors = relative_errors(packed_run(policy, ONE_ROW, SHAPES), separate_run(plain, SHAPES))
    finally:
        row_check._verdict.cache_clear()
    assert max(errors) < BOUND, errors


def narrow_first_layer(model: Any) -> bool:
    layers = model.base_model.layers
    narrowed = last_layer._narrowed
    forward = layers[0].forward
    layers[0].forward = lambda *args, **kwargs: narrowed(forward, *args, **kwargs)
    return True


def test_a_model_is_narrowed_once_and_only_if_it_has_layers(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    model = load(folder)
    again = PolicyModel(model.model, 16, "merged")
    tokens = tokens_of_mlps(again)
    (row,) = pack(ONE_ROW, SHAPES)
    expected = run_micro_batch(model, row, TEMPERATURE)
    tokens.clear()
    assert torch.equal(run_micro_batch(again, row, TEMPERATURE)[0], expected[0])
    assert tokens == [row.num_tokens, WANTED]
    model.model.base_model.layers = torch.nn.ModuleList()
    assert not last_layer.narrow_last_layer(model.model)


# ---- which tokens --------------------------------------------------------------------------------


def group(prompt: int, *responses: int) -> tuple[SegmentLayout, Tensor]:
    """A row of one group, and the positions that predict its responses."""
    segments, predictors, start = [(0, prompt, -1)], [], prompt
    for length in responses:
        segments.append((start, length, 0))
        predictors += [prompt - 1, *range(start, start + length - 1)]
        start += length
    return SegmentLayout(segments), torch.tensor(predictors)


def test_of_a_prompt_the_last_token() -> None:
    layout, predictors = group(100, 40, 30)
    wanted = wanted_tokens(layout, predictors)
    assert wanted is not None and wanted is wanted_tokens(layout, predictors)
    assert wanted.positions.tolist() == list(range(99, 170))
    assert wanted.others.tolist() == list(range(99))
    assert wanted.layout.first_queries == (99, 0, 0)
    assert torch.equal(wanted.positions[wanted.predictors], predictors)


@pytest.mark.parametrize(
    ("prompt", "responses", "why"),
    [
        (SHORTEST, (8, 8), "its beginning is short"),
        (100, (200, 110), "it is a small share of the row"),
    ],
)
def test_not_where_it_would_not_pay(prompt: int, responses: tuple[int, ...], why: str) -> None:
    layout, predictors = group(prompt, *responses)
    left_out = prompt - 1
    assert left_out < SHORTEST or left_out < LEAST_SHARE * layout.num_tokens, why
    assert wanted_tokens(layout, predictors) is None
    longer, of_longer = group(prompt + 40, *responses)
    assert wanted_tokens(longer, of_longer) is not None


def test_rows_without_predictors_run_whole() -> None:
    layout, _ = group(100, 8)
    assert wanted_tokens(layout, torch.empty(0, dtype=torch.int64)) is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), num_segments=st.integers(1, 8), trained=st.floats(0.0, 0.9))
def test_random_rows(seed: int, num_segments: int, trained: float) -> None:
    """Whatever is trained: predictors stay, and of a segment only a beginning without any goes."""
    layout = SegmentLayout(random_forest(seed, num_segments, longest=80))
    rng = np.random.default_rng(seed)
    begins = int(trained * layout.num_tokens)  # so that some segments have none
    index = torch.from_numpy(np.sort(rng.integers(begins, layout.num_tokens, 12)))
    wanted = wanted_tokens(layout, index)
    if wanted is None:
        return
    assert torch.equal(wanted.positions[wanted.predictors], index)
    both = torch.cat((wanted.positions, wanted.others)).sort().values
    assert torch.equal(both, torch.arange(layout.num_tokens))
    others = set(wanted.others.tolist())
    assert wanted.layout.first_queries is not None
    for (start, length, _), first in zip(layout.segments, wanted.layout.first_queries, strict=True):
        assert {p for p in range(start, start + length) if p in others} == set(
            range(start, start + first)
        )
        assert not first or first >= SHORTEST
    assert len(others) >= LEAST_SHARE * layout.num_tokens
