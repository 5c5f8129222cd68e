"""Streamed gradients of the bare tri-model in fp64, and what each of the three models is for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from easyrl.config import ModelConfig
from easyrl.engines.base import MetricSums, TriLogprobs
from easyrl.models import tri_model as tri_model_module
from easyrl.models.loading import load_policy_model
from easyrl.models.tri_model import TriModel, frozen_model
from easyrl.recipes import losses as losses_module
from easyrl.recipes.losses import policy_loss, terms_of
from easyrl.schema import FrozenLogprobs, MicroBatch
from tests.easyrl.engines.engine_cases import (
    AGGREGATIONS,
    CLIP,
    ENTROPY_COEF,
    KL_COEF,
    TEMPERATURE,
    denominator,
    dense_gold,
    prepare,
    relative_error,
    streamed,
)
from tests.recipes import token_grpo

CPU = torch.device("cpu")
OBJECTIVE = token_grpo(
    kl_coef=KL_COEF, entropy_coef=ENTROPY_COEF, clip_eps_low=CLIP, clip_eps_high=CLIP
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    prepare(folder)
    return folder


@pytest.fixture
def no_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """RMSNorm in the model's dtype: the stock one rounds to fp32, differently in each packing."""

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)


def tri_model(folder: Path, *, frozen: bool = True) -> TriModel:
    policy, reference, old = (
        load_policy_model(ModelConfig(path=folder / name), dtype=torch.float64)
        for name in ("policy", "reference", "old")
    )
    return TriModel(
        policy,
        reference=frozen_model(reference) if frozen else None,
        old_policy=frozen_model(old) if frozen else None,
        temperature=TEMPERATURE,
        device=CPU,
    )


def old_logprobs(tri: TriLogprobs, row: MicroBatch) -> Tensor:
    """As the loss is given them."""
    return terms_of(row, tri.frozen, tri.logprobs).old_logprobs


def gradients(tri: TriModel) -> dict[str, Tensor]:
    return {n.removeprefix("model."): p.grad for n, p in tri.policy.named_parameters()}


def accumulated(folder: Path, aggregation: str, *, seed: int, budgets: tuple[int, int]) -> TriModel:
    tri = tri_model(folder)
    for row in streamed(aggregation, seed=seed, budgets=budgets):
        loss_sum, _ = policy_loss(tri(row), row, OBJECTIVE)
        (loss_sum / denominator(aggregation)).backward()
    return tri


@pytest.mark.parametrize(("seed", "budgets"), [(0, (24, 60)), (1, (1000, 30))])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_streamed_gradient_is_the_one_pass_gradient(
    folder: Path, no_casts: None, aggregation: str, seed: int, budgets: tuple[int, int]
) -> None:
    """Groups shuffled and packed differently, against dense sequences in one backward, fp64."""
    gold = dense_gold(folder, aggregation, max_grad_norm=float("inf"))
    error = relative_error(
        gradients(accumulated(folder, aggregation, seed=seed, budgets=budgets)), gold.gradients
    )
    assert error < 1e-10, error  # the bound; measured 3e-15


def test_dividing_each_row_by_its_own_count_is_another_gradient(folder: Path) -> None:
    """The usual mistake, a mean of means, is far off: the comparison sees it."""
    gold = dense_gold(folder, "token", max_grad_norm=float("inf"))
    tri = tri_model(folder)
    rows = streamed("token")
    for row in rows:
        loss_sum, _ = policy_loss(tri(row), row, OBJECTIVE)
        (loss_sum / row.num_loss_tokens / len(rows)).backward()
    assert relative_error(gradients(tri), gold.gradients) > 1e-2


def test_only_the_policy_carries_gradient(folder: Path) -> None:
    tri = tri_model(folder)
    row = streamed("token")[0]
    result = tri(row)
    assert result.logprobs.requires_grad and result.entropy.requires_grad
    assert result.frozen.reference is not None
    assert not result.frozen.reference.requires_grad and not old_logprobs(result, row).requires_grad
    for other in (old_logprobs(result, row), result.frozen.reference):
        assert (other - result.logprobs).abs().max() > 0.05  # three different models


def test_skipped_models(folder: Path) -> None:
    """No reference; the policy's own log-probabilities serve as the old ones."""
    tri = tri_model(folder, frozen=False)
    row = streamed("token")[0]
    result = tri(row)
    assert result.frozen.reference is None
    assert torch.equal(old_logprobs(result, row), result.logprobs)
    assert not old_logprobs(result, row).requires_grad


def test_old_policy_that_is_the_policy_is_not_run(folder: Path) -> None:
    """The first update of a batch; the reference is not concerned."""
    tri, row = tri_model(folder), streamed("token")[0]
    plain = tri(row)
    tri.old_is_policy = True
    result = tri(row)
    assert torch.equal(old_logprobs(result, row), result.logprobs)
    assert not old_logprobs(result, row).requires_grad
    assert result.frozen.reference is not None and plain.frozen.reference is not None
    assert torch.equal(result.frozen.reference, plain.frozen.reference)
    assert not torch.equal(old_logprobs(result, row), old_logprobs(plain, row))


def test_policy_logprobs_are_those_of_training(folder: Path) -> None:
    tri = tri_model(folder, frozen=False)
    row = streamed("token")[0]
    logprobs = tri.policy_logprobs(row)
    assert torch.equal(logprobs, tri(row).logprobs) and not logprobs.requires_grad


class OnAnyDevice(nn.Module):
    """A policy that says nothing, on the device of its row."""

    def forward(self, *arguments: object) -> tuple[Tensor, ...]:
        label_ids, losses = arguments[4], arguments[6]
        assert isinstance(label_ids, Tensor)
        logprobs, entropy = torch.zeros((2, len(label_ids)), device=label_ids.device)
        if losses is None:
            return logprobs, entropy
        assert callable(losses)
        return losses(logprobs, entropy, slice(None)).sum(), logprobs, entropy


@pytest.mark.parametrize("same_pass", [True, False])
def test_what_was_computed_ahead_goes_to_the_device(
    monkeypatch: pytest.MonkeyPatch, same_pass: bool
) -> None:
    """Row and frozen log-probabilities come in host memory; all that is counted is on the device,
    which does not calculate with the host's tensors."""
    counted = []

    def metrics(tri: TriLogprobs, row: MicroBatch, *_: object) -> MetricSums:
        counted.extend([tri.logprobs, tri.frozen.reference, tri.frozen.old_policy])
        counted.extend([row.sequence_index, row.advantages, row.inference_logprobs])
        return MetricSums()

    for module in (tri_model_module, losses_module):
        monkeypatch.setattr(module, "loss_metrics", metrics)
    meta = torch.device("meta")
    tri = TriModel(OnAnyDevice(), reference=None, old_policy=None, temperature=1.0, device=meta)
    row = streamed("token")[0]
    ahead = torch.zeros(row.num_loss_tokens)
    row = replace(row, frozen=FrozenLogprobs(reference=ahead, old_policy=ahead))
    loss_sum, _ = tri.loss(row, OBJECTIVE, same_pass=same_pass)
    assert {tensor.device for tensor in (loss_sum, *counted)} == {meta} and len(counted) == 6
