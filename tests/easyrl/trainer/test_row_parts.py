"""Restricted rows say of their tokens what the whole row says; random forests, dense models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from easyrl.config import ModelConfig
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.loading import load_policy_model
from easyrl.models.policy_model import PolicyModel, run_micro_batch
from easyrl.schema import FrozenLogprobs, MicroBatch, SampleKey, Segment
from easyrl.trainer.row_split import join_logprobs, restrict, split_logprobs
from tests.dataloaders.packed_rows import BUSY, branch, trained_tokens
from tests.tiny_models import VOCAB_SIZE, save_tiny_model, tiny_model


@st.composite
def random_rows(draw: st.DrawFn) -> MicroBatch:
    """A random forest; sequences that end anywhere in it, share beginnings and leave out tokens."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    segments: list[Segment] = []
    path: list[int] = []  # the last segment and its ancestors, root first
    end = 0
    for _ in range(draw(st.integers(1, 8))):
        path = path[: draw(st.integers(0, len(path)))]
        segments.append(Segment(end, draw(st.integers(1, 4)), path[-1] if path else -1))
        path.append(len(segments) - 1)
        end += segments[-1].length
    ids = torch.randint(1, VOCAB_SIZE, (end,), generator=rng)
    row = MicroBatch(
        input_ids=ids,
        position_ids=torch.zeros(end, dtype=torch.int64),
        segments=tuple(segments),
        predictor_index=ids,
        label_ids=ids,
        advantages=torch.zeros(0),
        inference_logprobs=torch.zeros(0),
        loss_weights=torch.zeros(0),
        sequence_index=ids,
        sequences=(),
        endpoints=(),
    )
    depth = [len(branch(row, position)) - 1 for position in range(end)]
    predictors, sequence_index = [], []
    num_sequences = draw(st.integers(1, 5))
    for sequence in range(num_sequences):
        positions = branch(row, draw(st.integers(0, end - 1)))
        chosen = [p for p in positions if draw(st.booleans())] or positions[-1:]
        predictors += chosen
        sequence_index += [sequence] * len(chosen)
    count = len(predictors)
    return replace(
        row,
        position_ids=torch.tensor(depth),
        predictor_index=torch.tensor(predictors),
        label_ids=torch.randint(1, VOCAB_SIZE, (count,), generator=rng),
        advantages=torch.randn(count, generator=rng),
        inference_logprobs=torch.randn(count, generator=rng),
        loss_weights=torch.rand(count, generator=rng),
        sequence_index=torch.tensor(sequence_index),
        sequences=tuple(SampleKey(1, 7, 3 * q) for q in range(num_sequences)),
        endpoints=tuple(f"http://{q}" for q in range(num_sequences)),
    )


def subset(data: st.DataObject, row: MicroBatch) -> set[SampleKey]:
    return data.draw(st.sets(st.sampled_from(row.sequences), min_size=1))


def kept_tokens(row: MicroBatch, keys: set[SampleKey]) -> list[int]:
    return [n for n, q in enumerate(row.sequence_index.tolist()) if row.sequences[q] in keys]


@settings(BUSY, max_examples=150)
@given(row=random_rows(), data=st.data())
def test_a_restricted_row_has_the_same_tokens_behind_the_same_tokens(
    row: MicroBatch, data: st.DataObject
) -> None:
    keys = subset(data, row)
    part = restrict(row, keys)
    whole = trained_tokens([row])
    assert trained_tokens([part]) == [whole[n] for n in kept_tokens(row, keys)]
    assert part.sequences == tuple(key for key in row.sequences if key in keys)
    assert part.frozen is None
    SegmentLayout(part.segments)  # raises where it is not depth first


@settings(BUSY, max_examples=100)
@given(row=random_rows(), data=st.data())
def test_nothing_is_in_it_that_no_token_depends_on(row: MicroBatch, data: st.DataObject) -> None:
    part = restrict(row, subset(data, row))
    seen = {p for predictor in part.predictor_index.tolist() for p in branch(part, predictor)}
    for segment in part.segments:  # whole segments are kept, behind their first token too
        assert segment.start in seen


@settings(BUSY, max_examples=50)
@given(row=random_rows(), data=st.data(), there=st.tuples(*[st.booleans()] * 3))
def test_parts_join_to_what_was_split(
    row: MicroBatch, data: st.DataObject, there: tuple[bool, bool, bool]
) -> None:
    """Split as a whole or after restriction, and joined in the row's order."""
    said = [torch.randn(row.num_loss_tokens) if each else None for each in there]
    keys = subset(data, row)
    others = set(row.sequences) - keys
    parts: dict[SampleKey, FrozenLogprobs] = {}
    for some in (keys, others):
        if some:
            tokens = torch.tensor(kept_tokens(row, some))
            own = [None if x is None else x[tokens] for x in said]
            frozen = FrozenLogprobs(own[0], own[1], teacher=own[2])
            parts |= split_logprobs(restrict(row, some), frozen)
    joined = join_logprobs(row, parts)
    found = (joined.reference, joined.old_policy, joined.teacher)
    for got, expected in zip(found, said, strict=True):
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[PolicyModel, PreTrainedModel]:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)
    return load_policy_model(ModelConfig(path=folder, dtype="fp32")), tiny_model(
        "qwen3", tied=True
    ).double()


@torch.no_grad()
def dense_logprobs(model: PreTrainedModel, row: MicroBatch) -> Tensor:
    """Each token of the row behind the tokens of its own branch alone; fp64."""
    values = []
    for predictor, label in zip(row.predictor_index.tolist(), row.label_ids.tolist(), strict=True):
        logits = model(row.input_ids[branch(row, predictor)][None]).logits[0, -1]
        values.append(logits.log_softmax(-1)[label])
    return torch.stack(values)


@settings(BUSY, max_examples=15)
@given(row=random_rows(), data=st.data())
def test_a_model_says_of_it_what_it_says_of_each_branch_alone(
    models: tuple[PolicyModel, PreTrainedModel], row: MicroBatch, data: st.DataObject
) -> None:
    policy, dense = models
    keys = subset(data, row)
    with torch.no_grad():
        got, _ = run_micro_batch(policy, restrict(row, keys), 1.0)
    expected = dense_logprobs(dense, row)[kept_tokens(row, keys)]
    error = float((got.double() - expected).abs().max())
    assert error < 2e-5, error  # fp32 against fp64
