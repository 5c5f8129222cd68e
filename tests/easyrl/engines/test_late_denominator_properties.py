"""However a batch is spread, its updates are those of the whole batch at once, fp64.

Any partition into slices (one update each), ranks and micro-batches, any order of arrival, against
padded sequences in one forward per update and the formula written out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from easyrl.config import ModelConfig
from easyrl.engines.base import MetricSums
from easyrl.metrics.event_log import ignore
from easyrl.models.loading import load_policy_model
from easyrl.models.policy_model import PolicyModel
from easyrl.models.tri_model import TriModel, frozen_model
from easyrl.recipes.estimators import Aggregation, group_advantages
from easyrl.recipes.losses import policy_loss
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import Key, MicroBatch, RolloutGroup
from easyrl.trainer.accumulation import Accumulator, GroupFunctions
from tests.recipes import group_functions, run_settings, token_grpo
from tests.tiny_models import random_group, save_tiny_model

BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a shared machine
CPU = torch.device("cpu")
MAX_TOKENS, LEARNING_RATE, TEMPERATURE = 12, 0.5, 0.8
OBJECTIVE = token_grpo(entropy_coef=0.01, clip_eps_low=0.1, clip_eps_high=0.2)


@dataclass(frozen=True)
class Models:
    """The same weights behind our head and as Hugging Face has them."""

    ours: PolicyModel
    plain: PreTrainedModel


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """One small layer; RMSNorm in fp64, since the stock one rounds to fp32 in each packing anew."""

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)

    folder = tmp_path_factory.mktemp("late") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3RMSNorm, "forward", forward)
        save_tiny_model(folder, "qwen3", num_hidden_layers=1, head_dim=8)
        ours = load_policy_model(ModelConfig(path=folder), dtype=torch.float64)
        yield Models(ours, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))


@pytest.fixture(scope="module")
def stop() -> Iterator[StopRequest]:
    request = StopRequest(60.0)
    yield request
    request.close()


@dataclass(frozen=True)
class Spread:
    """A batch and how it comes."""

    slices: list[list[RolloutGroup]]  # by update
    arrivals: list[list[list[list[RolloutGroup]]]]  # update, rank, what is ready at a time
    budgets: list[int]  # of a micro-batch, by rank
    aggregation: Aggregation
    mask_truncated: bool

    def __repr__(self) -> str:
        ready = [[[len(groups) for groups in rank] for rank in s] for s in self.arrivals]
        lengths = [[[len(c.token_ids) for c in g.completions] for g in s] for s in self.slices]
        how = (self.budgets, self.aggregation, self.mask_truncated)
        return f"Spread({lengths}, {ready}, {how})"


@st.composite
def spreads(draw: st.DrawFn) -> Spread:
    groups = [
        random_group(
            np.random.default_rng(draw(st.integers(0, 1000))),
            draw(st.integers(1, 6)),
            draw(st.lists(st.integers(0, 8), min_size=2, max_size=4)),
            index=index,
            masked=draw(st.sampled_from([0.0, 0.4])),
            truncated=tuple(draw(st.sets(st.integers(0, 3), max_size=2))),
        )
        for index in range(draw(st.integers(1, 6)))
    ]
    slices = cut(draw, groups)
    num_ranks = draw(st.integers(1, 3))
    arrivals = []
    for part in slices:
        shares = [draw(st.permutations(part[rank::num_ranks])) for rank in range(num_ranks)]
        arrivals.append([cut(draw, share) for share in shares])
    budgets = [draw(st.integers(1, 60)) for _ in range(num_ranks)]
    aggregation = draw(st.sampled_from(["sequence", "token", "constant"]))
    return Spread(slices, arrivals, budgets, aggregation, draw(st.booleans()))


def cut(draw: st.DrawFn, groups: list[RolloutGroup]) -> list[list[RolloutGroup]]:
    """Consecutive parts, none of them empty."""
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(groups) - 1)), max_size=3)))
    parts = [groups[a:b] for a, b in zip([0, *cuts], [*cuts, len(groups)], strict=True)]
    return [part for part in parts if part]


class Arrivals:
    """A ``GroupSource``: one rank's groups of an update, as they become ready."""

    wait_s = load_s = 0.0
    first_group_wait_s = None
    accepted_versions = frozenset({"run:0:0"})
    recovered: frozenset[Key] = frozenset()
    discarded: frozenset[Key] = frozenset()

    def __init__(self, calls: list[list[RolloutGroup]]) -> None:
        self._calls = list(calls)

    def note_trained(self, num_tokens: int) -> None: ...

    def drain_ready(self, max_tokens: int, idle: Any = None) -> list[RolloutGroup]:
        return self._calls.pop(0) if self._calls else []

    def complete(self) -> None: ...
    def interrupt(self, error: BaseException) -> None: ...
    def close(self) -> None: ...


class OneRank:
    """What the accumulator wants of a ``TrainEngine``."""

    device = CPU
    lockstep = False

    def __init__(self, tri: TriModel) -> None:
        self._tri = tri

    def finish_backwards(self) -> list[MetricSums]:
        return []

    def prepare(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        return micro_batches

    def forward_backward(self, micro_batches: list[MicroBatch]) -> list[MetricSums]:
        sums = []
        for row in micro_batches:
            loss, metrics = policy_loss(self._tri(row), row, OBJECTIVE)
            loss.backward()
            sums.append(metrics)
        return sums


class InTurn:
    """A ``Collectives`` of ranks that come one after another: what they say is given in advance."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def all_gather(self, value: Any) -> list[Any]:
        self.said.append(value)
        return self.said


def streamed_updates(model: PolicyModel, spread: Spread, stop: StopRequest) -> dict[str, Tensor]:
    """Weights after the updates; ranks one after another, their gradients averaged."""
    policy, old = copy.deepcopy(model), copy.deepcopy(model)
    tri = TriModel(
        policy,
        reference=None,
        old_policy=frozen_model(old),
        temperature=TEMPERATURE,
        device=CPU,
    )
    tri.old_is_policy = True
    for ranks in spread.arrivals:
        policy.zero_grad()
        collectives = InTurn()
        for calls, budget in zip(ranks, spread.budgets, strict=True):
            accumulator = Accumulator(
                engine=OneRank(tri),  # type: ignore[arg-type]
                collectives=collectives,  # type: ignore[arg-type]
                functions=functions(spread, budget),
                stop=stop,
                is_interruption=lambda error: False,
                record=ignore,
                max_tokens=budget,
                synchronous=False,
            )
            merged = accumulator.accumulate(Arrivals(calls)).merge(collectives)  # type: ignore[arg-type]
        if take_step(policy, merged.denominator / len(ranks), averaged_over=len(ranks)):
            tri.old_is_policy = False
    return weights(policy.model)


def functions(spread: Spread, budget: int) -> GroupFunctions:
    recipe = replace(
        OBJECTIVE, aggregation=spread.aggregation, mask_truncated=spread.mask_truncated
    )
    return group_functions(recipe, run_settings(MAX_TOKENS), max_tokens_per_micro_batch=budget)


@torch.no_grad()
def take_step(policy: PolicyModel, divisor: float, averaged_over: int) -> bool:
    """Plain gradient descent; False where nothing was trained."""
    parameters = [p for p in policy.parameters() if p.grad is not None]
    for p in parameters:
        assert p.grad is not None
        p -= LEARNING_RATE * (p.grad / averaged_over / divisor)
    return bool(parameters)


def whole_batch_updates(model: PreTrainedModel, spread: Spread) -> dict[str, Tensor]:
    """Weights after the updates, each from one padded forward of all its sequences."""
    policy, old = copy.deepcopy(model), copy.deepcopy(model)
    for groups in spread.slices:
        trained = []  # prompt, completion, advantage, mask
        for group in groups:
            for c, a in zip(
                group.completions, group_advantages(group.rewards, "group_std"), strict=True
            ):
                masked = spread.mask_truncated and c.finish_reason == "length"
                trained.append((group.prompt.token_ids, c.token_ids, a, c.loss_mask & (not masked)))
        if not trained:
            continue
        loss = dense_loss(policy, old, trained, spread.aggregation)
        policy.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in policy.parameters():
                p -= LEARNING_RATE * p.grad
    return weights(policy)


def dense_loss(policy: nn.Module, old: nn.Module, trained: list, aggregation: str) -> Tensor:
    sequences = [np.concatenate((prompt, response)) for prompt, response, _, _ in trained]
    ids = torch.zeros(len(trained), max(map(len, sequences)), dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (sequence, (prompt, _, _, loss_mask)) in enumerate(
        zip(sequences, trained, strict=True)
    ):
        ids[row, : len(sequence)] = torch.from_numpy(sequence)
        mask[row, len(prompt) : len(sequence)] = torch.from_numpy(loss_mask)
    mask = mask[:, 1:]
    advantages = torch.tensor([float(a) for _, _, a, _ in trained], dtype=torch.float64)[:, None]
    logp, entropy = padded_logprobs(policy, ids)
    with torch.no_grad():
        old_logp, _ = padded_logprobs(old, ids)
    ratio = (logp - old_logp).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.9, 1.2) * advantages)
    per_token = (-surrogate - 0.01 * entropy) * mask
    counts = mask.sum(1)
    if aggregation == "token":
        return per_token.sum() / counts.sum().clamp(min=1)
    lengths = counts.clamp(min=1) if aggregation == "sequence" else torch.tensor(MAX_TOKENS)
    weights = (1 / lengths.double()).float().double()  # a row's weights are float32: inputs
    return (per_token.sum(1) * weights).mean()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def padded_logprobs(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """[B, L - 1] of the tokens behind the first; padding on the right is seen by nobody."""
    logp = (model(ids).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
    return logp.gather(2, ids[:, 1:, None]).squeeze(2), -(logp.exp() * logp).sum(-1)


@settings(BUSY, max_examples=50)
@given(spread=spreads())
def test_updates_do_not_depend_on_how_the_batch_comes(
    models: Models, stop: StopRequest, spread: Spread
) -> None:
    start = weights(models.plain)
    ours = streamed_updates(models.ours, spread, stop)
    expected = whole_batch_updates(models.plain, spread)
    assert ours.keys() == expected.keys()
    moved = max(float((expected[name] - start[name]).norm()) for name in expected)
    for name, weight in expected.items():
        # of the largest movement, since a single parameter's may be nothing; measured 1e-14
        assert float((ours[name] - weight).norm()) <= 1e-10 * moved, name
