"""Loss sums and gradients against the published formulas on padded ``[B, T]`` tensors, in fp64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from easyrl.engines.base import TriLogprobs
from easyrl.recipes.estimators import importance_weights, kl_estimate, reward_to_go
from easyrl.recipes.losses import loss_metrics, policy_loss, token_loss
from easyrl.schema import FrozenLogprobs, MicroBatch, SampleKey
from tests.recipes import token_grpo

LENGTHS = (3, 7, 1, 5)  # of the responses
MAX_TOKENS = 9  # of a response, Dr. GRPO's constant
DENOMINATORS = {"sequence": len(LENGTHS), "token": sum(LENGTHS), "constant": len(LENGTHS)}
ADVANTAGES = torch.tensor([0.9, -1.4, 0.3, -0.2], dtype=torch.float64)


class Padded(NamedTuple):
    """Tensors [B, T] as a padding trainer has them."""

    policy: Tensor
    old: Tensor
    reference: Tensor
    entropy: Tensor
    mask: Tensor


def padded_batch(spread: float = 0.5) -> Padded:
    """Log-probabilities with ratios policy / old on both sides of the clip."""
    generator = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), max(LENGTHS))

    def random(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    policy = random(1.0) - 3
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    return Padded(
        policy.requires_grad_(),
        (policy + random(spread)).detach(),
        (policy + random(0.4)).detach(),
        random(0.1).abs().requires_grad_(),
        mask,
    )


def trl_loss(batch: Padded, aggregation: str, low: float, high: float, beta: float) -> Tensor:
    """TRL's ``grpo``, ``dapo`` and ``dr_grpo`` losses (its documentation, section Loss Types)."""
    ratio = torch.exp(batch.policy - batch.old)
    advantages = ADVANTAGES[:, None]
    surrogate = torch.min(ratio * advantages, torch.clamp(ratio, 1 - low, 1 + high) * advantages)
    log_ratio = batch.reference - batch.policy
    per_token = -surrogate + beta * (torch.exp(log_ratio) - log_ratio - 1)
    masked = per_token * batch.mask
    if aggregation == "sequence":
        return (masked.sum(-1) / batch.mask.sum(-1)).mean()
    if aggregation == "token":
        return masked.sum() / batch.mask.sum()
    return masked.sum() / (batch.mask.shape[0] * MAX_TOKENS)


def packed(batch: Padded, aggregation: str) -> tuple[TriLogprobs, MicroBatch]:
    """The same tokens as a packed row has them."""
    lengths = torch.tensor(LENGTHS)
    sequence_index = torch.arange(len(LENGTHS)).repeat_interleave(lengths)
    weights = {
        "sequence": (1.0 / lengths.double())[sequence_index],
        "token": torch.ones(len(sequence_index), dtype=torch.float64),
        "constant": torch.full((len(sequence_index),), 1 / MAX_TOKENS, dtype=torch.float64),
    }[aggregation]
    empty = torch.zeros(0, dtype=torch.int64)
    micro_batch = MicroBatch(
        input_ids=empty,
        position_ids=empty,
        segments=(),
        predictor_index=empty,
        label_ids=torch.zeros(len(sequence_index), dtype=torch.int64),
        advantages=ADVANTAGES[sequence_index],
        inference_logprobs=batch.old[batch.mask],
        loss_weights=weights,
        sequence_index=sequence_index,
        sequences=tuple(SampleKey(0, 0, i) for i in range(len(LENGTHS))),
        endpoints=("http://one",) * len(LENGTHS),
    )
    frozen = FrozenLogprobs(batch.reference[batch.mask], batch.old[batch.mask])
    return TriLogprobs(batch.policy[batch.mask], batch.entropy[batch.mask], frozen), micro_batch


def assert_equal(batch: Padded, got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    (got_gradient,) = torch.autograd.grad(got, batch.policy, retain_graph=True)
    (expected_gradient,) = torch.autograd.grad(expected, batch.policy, retain_graph=True)
    assert expected_gradient.abs().sum() > 0
    torch.testing.assert_close(got_gradient, expected_gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kl_coef", [0.0, 0.07])
@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
def test_equals_trl(aggregation: str, kl_coef: float) -> None:
    batch = padded_batch()
    recipe = token_grpo(kl_coef=kl_coef, clip_eps_low=0.2, clip_eps_high=0.28)
    loss_sum, metrics = policy_loss(*packed(batch, aggregation), recipe)
    # the comparison is about clipping too
    assert metrics.sums["clip_low_sum"] > 0 and metrics.sums["clip_high_sum"] > 0
    expected = trl_loss(batch, aggregation, 0.2, 0.28, kl_coef)
    assert_equal(batch, loss_sum / DENOMINATORS[aggregation], expected)


def test_the_aggregations_differ() -> None:
    batch = padded_batch()
    losses = [
        policy_loss(*packed(batch, name), token_grpo())[0].item() / DENOMINATORS[name]
        for name in DENOMINATORS
    ]
    assert min(abs(a - b) for a, b in zip(losses, losses[1:] + losses[:1], strict=True)) > 1e-3


def test_low_and_high_clip_are_not_interchangeable() -> None:
    batch = padded_batch()
    tri, micro_batch = packed(batch, "token")
    one, _ = policy_loss(tri, micro_batch, token_grpo(clip_eps_low=0.1, clip_eps_high=0.3))
    two, _ = policy_loss(tri, micro_batch, token_grpo(clip_eps_low=0.3, clip_eps_high=0.1))
    assert (one - two).abs() > 1e-2


def test_on_policy_gradient_is_the_plain_policy_gradient() -> None:
    """With old = policy the ratio is 1 and ``∇ loss = -Σ A ∇ log policy``: no clip, no ratio."""
    batch = padded_batch(spread=0.0)
    tri, micro_batch = packed(batch, "token")
    tri = replace(tri, frozen=FrozenLogprobs(tri.frozen.reference, None))
    loss_sum, metrics = policy_loss(tri, micro_batch, token_grpo())
    plain = -(micro_batch.advantages * tri.logprobs).sum()
    got, expected = (
        torch.autograd.grad(x, batch.policy, retain_graph=True)[0] for x in (loss_sum, plain)
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    assert metrics.sums["clip_low_sum"] == metrics.sums["clip_high_sum"] == 0


@pytest.mark.parametrize("correction", ["none", "truncated", "masked"])
@pytest.mark.parametrize("old_is_policy", [False, True])
def test_losses_of_parts_are_those_of_the_whole(
    correction: Literal["none", "truncated", "masked"], old_is_policy: bool
) -> None:
    """What a projection that forms its gradient chunk by chunk asks for."""
    batch = padded_batch()
    tri, micro_batch = packed(batch, "sequence")
    old = None if old_is_policy else tri.frozen.old_policy
    tri = replace(tri, frozen=FrozenLogprobs(tri.frozen.reference, old))
    recipe = token_grpo(
        kl_coef=0.1, entropy_coef=0.01, importance_correction=correction, importance_cap=1.5
    )
    assert recipe.span == "token"
    whole, metrics = policy_loss(tri, micro_batch, recipe)
    losses = token_loss(micro_batch, tri.frozen, recipe)
    policy, entropy = tri.logprobs, tri.entropy
    chunks = [slice(start, start + 3) for start in range(0, len(policy), 3)]
    parts = [losses(policy[rows], entropy[rows], rows) for rows in chunks]
    assert [len(part) for part in parts] == [3] * 5 + [1]
    total = torch.cat(parts).sum()
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
    for leaf in (batch.policy, batch.entropy):
        one, other = (torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (total, whole))
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    again = loss_metrics(tri, micro_batch, recipe, total)
    assert again.sums == pytest.approx(metrics.sums, rel=1e-12)


def test_a_penalty_on_later_tokens_is_no_sum_over_tokens() -> None:
    recipe = token_grpo(kl_in_reward_coef=0.1)
    assert recipe.span == "sequence"
    tri, micro_batch = packed(padded_batch(), "token")
    with pytest.raises(AssertionError):
        token_loss(micro_batch, tri.frozen, recipe)


def test_entropy_bonus_lowers_the_loss() -> None:
    batch = padded_batch()
    tri, micro_batch = packed(batch, "sequence")
    without, _ = policy_loss(tri, micro_batch, token_grpo())
    with_bonus, _ = policy_loss(tri, micro_batch, token_grpo(entropy_coef=0.3))
    bonus = 0.3 * (micro_batch.loss_weights * tri.entropy).sum()
    torch.testing.assert_close(without - with_bonus, bonus, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(with_bonus, batch.entropy)
    assert (gradient[batch.mask] < 0).all()


def categorical_kl_gradients(estimator: str) -> tuple[Tensor, Tensor]:
    """Expected gradient of an estimator over all outcomes, and of the exact reverse KL."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    expected = (logp.exp().detach() * kl_estimate(logp, reference, estimator)).sum()
    exact = (logp.exp() * (logp - reference)).sum()
    return (
        torch.autograd.grad(expected, logits, retain_graph=True)[0],
        torch.autograd.grad(exact, logits)[0],
    )


def test_k2_has_the_gradient_of_the_reverse_kl_and_k3_has_not() -> None:
    got, exact = categorical_kl_gradients("k2")
    torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-15)
    got, exact = categorical_kl_gradients("k3")
    assert (got - exact).norm() > 0.1 * exact.norm()


def test_k3_is_unbiased_and_never_negative() -> None:
    generator = torch.Generator().manual_seed(2)
    p, q = torch.randn(2, 8, generator=generator, dtype=torch.float64).log_softmax(-1)
    k3 = kl_estimate(p, q, "k3")
    assert (k3 >= 0).all()
    torch.testing.assert_close((p.exp() * k3).sum(), (p.exp() * (p - q)).sum(), rtol=1e-12, atol=0)


def test_kl_estimator_is_the_configured_one() -> None:
    tri, micro_batch = packed(padded_batch(), "token")
    sums = {
        name: float(policy_loss(tri, micro_batch, token_grpo(kl_coef=1.0, kl_estimator=name))[0])
        for name in ("k2", "k3")
    }
    assert tri.frozen.reference is not None
    difference = [
        float(kl_estimate(tri.logprobs, tri.frozen.reference, name).sum()) for name in ("k2", "k3")
    ]
    assert math.isclose(sums["k2"] - sums["k3"], difference[0] - difference[1], rel_tol=1e-9)


def test_kl_in_the_reward_is_credited_to_the_tokens_before_it() -> None:
    """Per-token reward ``-coef k1``, its return from each token on, by explicit loops."""
    batch = padded_batch()
    tri, micro_batch = packed(batch, "token")
    loss_sum, _ = policy_loss(tri, micro_batch, token_grpo(kl_in_reward_coef=0.2))
    advantages = torch.zeros_like(batch.policy)
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            penalty = sum(float((batch.policy - batch.reference)[b, u]) for u in range(t, length))
            advantages[b, t] = ADVANTAGES[b] - 0.2 * penalty
    ratio = torch.exp(batch.policy - batch.old)
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    assert_equal(batch, loss_sum, -(surrogate * batch.mask).sum())


def test_reward_to_go_of_nothing() -> None:
    assert reward_to_go(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_reward_to_go_sums_on_the_host() -> None:
    """CUDA's running sum of floats is not deterministic; tensors there need no device here."""
    on_device = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten._local_scalar_dense.default:
                return True  # there are no values: the tokens are in order
            if any(isinstance(x, Tensor) and x.is_cuda for x in args):
                on_device.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        values = torch.empty(5, device="cuda")
        with Recorder():
            result = reward_to_go(values, torch.empty(5, dtype=torch.int64, device="cuda"))
    assert result.is_cuda and result.dtype == values.dtype
    assert set(on_device) <= {torch.ops.aten._to_copy, torch.ops.prim.device}


@pytest.mark.parametrize("correction", ["none", "truncated", "masked"])
def test_loss_is_a_sum_over_any_partition(correction: str) -> None:
    """Two halves of a row add up to the row: what lets groups stream in."""
    batch = padded_batch()
    tri, micro_batch = packed(batch, "sequence")
    micro_batch = replace(micro_batch, inference_logprobs=inference_logprobs(batch))
    recipe = token_grpo(
        kl_coef=0.1,
        entropy_coef=0.01,
        kl_in_reward_coef=0.1,
        importance_correction=correction,
        importance_cap=1.5,
    )
    whole, whole_metrics = policy_loss(tri, micro_batch, recipe)
    parts = []
    for keep in (micro_batch.sequence_index < 2, micro_batch.sequence_index >= 2):
        assert tri.frozen.reference is not None
        part = TriLogprobs(
            tri.logprobs[keep],
            tri.entropy[keep],
            FrozenLogprobs(tri.frozen.reference[keep], tri.frozen.old_policy[keep]),
        )
        row = replace(
            micro_batch,
            label_ids=micro_batch.label_ids[keep],
            advantages=micro_batch.advantages[keep],
            inference_logprobs=micro_batch.inference_logprobs[keep],
            loss_weights=micro_batch.loss_weights[keep],
            sequence_index=micro_batch.sequence_index[keep] % 2,
            sequences=(SampleKey(0, 0, 0), SampleKey(0, 0, 1)),
        )
        parts.append(policy_loss(part, row, recipe))
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole, rtol=1e-12, atol=0)
    total = parts[0][1]
    total.add(parts[1][1])
    assert total.sums == pytest.approx(whole_metrics.sums, rel=1e-12)
    assert total.maxima == whole_metrics.maxima
    gradients = [
        torch.autograd.grad(loss, batch.policy, retain_graph=True)[0]
        for loss in (parts[0][0] + parts[1][0], whole)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


# ---- importance correction ----------------------------------------------------------------------

CAP = 1.5


def inference_logprobs(batch: Padded) -> Tensor:
    """[N] of an inference engine that disagrees, on both sides of the cap."""
    generator = torch.Generator().manual_seed(9)
    noise = 0.6 * torch.randn(batch.old.shape, generator=generator, dtype=torch.float64)
    return (batch.old - noise)[batch.mask]


def corrected_loss(batch: Padded, inference: Tensor, correction: str) -> tuple[Tensor, list[float]]:
    """Token by token, with the formulas of TIS and of masked IS; [] are the ratios."""
    total = torch.zeros((), dtype=torch.float64)
    ratios = []
    tokens = [(b, t) for b, length in enumerate(LENGTHS) for t in range(length)]
    for n, (b, t) in enumerate(tokens):
        importance = math.exp(float(batch.old[b, t]) - float(inference[n]))
        ratios.append(importance)
        if correction == "truncated":
            weight = min(importance, CAP)
        else:
            weight = importance if 1 / CAP <= importance <= CAP else 0.0
        ratio = torch.exp(batch.policy[b, t] - batch.old[b, t])
        surrogate = torch.min(ratio * ADVANTAGES[b], ratio.clamp(0.8, 1.2) * ADVANTAGES[b])
        log_ratio = batch.reference[b, t] - batch.policy[b, t]
        kl = torch.exp(log_ratio) - log_ratio - 1
        total = total - weight * surrogate + 0.07 * kl
    return total, ratios


@pytest.mark.parametrize("correction", ["truncated", "masked"])
def test_importance_correction_equals_its_formula(correction: str) -> None:
    batch = padded_batch()
    tri, micro_batch = packed(batch, "token")
    inference = inference_logprobs(batch)
    micro_batch = replace(micro_batch, inference_logprobs=inference)
    recipe = token_grpo(kl_coef=0.07, importance_correction=correction, importance_cap=CAP)
    loss_sum, metrics = policy_loss(tri, micro_batch, recipe)
    expected, ratios = corrected_loss(batch, inference, correction)
    assert_equal(batch, loss_sum, expected)
    above, below = sum(r > CAP for r in ratios), sum(r < 1 / CAP for r in ratios)
    assert above > 0 and below > 0  # else one side of the cap is not tested
    counted = {"truncated": {"importance_capped_sum": above}}.get(
        correction, {"importance_masked_sum": above + below}
    )
    counted["importance_ratio_sum"] = sum(ratios)
    found = {name: v for name, v in metrics.sums.items() if name.startswith("importance_")}
    assert found == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize("correction", ["truncated", "masked"])
def test_equal_logprobs_are_left_alone_to_the_bit(correction: str) -> None:
    batch = padded_batch()
    tri, micro_batch = packed(batch, "sequence")  # inference_logprobs are the old policy's
    losses = [
        policy_loss(tri, micro_batch, token_grpo(importance_correction=name))[0]
        for name in ("none", correction)
    ]
    gradients = [torch.autograd.grad(x, batch.policy, retain_graph=True)[0] for x in losses]
    assert torch.equal(*losses) and torch.equal(*gradients)


def test_importance_weights_at_the_edges() -> None:
    ratio = torch.tensor([0.0, 0.5, 1.0, 2.0, 2.1, math.inf])
    assert importance_weights(ratio, "truncated", 2.0).tolist() == [0, 0.5, 1, 2, 2, 2]
    assert importance_weights(ratio, "masked", 2.0).tolist() == [0, 0.5, 1, 2, 0, 0]


def test_metrics_by_hand() -> None:
    """Two tokens: ratio 2 with a positive advantage, ratio 1/2 with a negative one."""
    policy = torch.tensor([math.log(0.8), math.log(0.1)])
    old = torch.tensor([math.log(0.4), math.log(0.2)])
    _, row = packed(padded_batch(), "token")
    row = replace(
        row,
        label_ids=torch.zeros(2, dtype=torch.int64),
        advantages=torch.tensor([1.0, -1.0]),
        inference_logprobs=old,
        loss_weights=torch.ones(2),
        sequence_index=torch.tensor([0, 1]),
        sequences=(SampleKey(0, 0, 0), SampleKey(0, 0, 1)),
        endpoints=("http://one", "http://two"),
    )
    tri = TriLogprobs(policy, torch.tensor([0.5, 0.25]), FrozenLogprobs(old, old))
    loss, metrics = policy_loss(tri, row, token_grpo())
    assert float(loss) == pytest.approx(-1.2 + 0.8)  # -min(2, 1.2) - min(-0.5, -0.8)
    log2 = math.log(2)
    assert metrics.sums == pytest.approx(
        {
            "loss_sum": -0.4,
            "entropy_sum": 0.75,
            "ratio_sum": 2.5,
            "clip_low_sum": 1,
            "clip_high_sum": 1,
            "logprob_diff_sum": 2 * log2,
            "inference_kl_sum": (2 - 1 - log2) + (0.5 - 1 + log2),
            "kl_sum": (0.5 - 1 + log2) + (2 - 1 - log2),
            "num_loss_tokens": 2,
            "num_sequences": 2,
        },
        rel=1e-6,
    )
    assert metrics.maxima == pytest.approx({"logprob_diff_max": log2, "ratio_max": 2}, rel=1e-6)


def test_responses_are_compared_by_themselves() -> None:
    batch = padded_batch()
    tri, row = packed(batch, "token")
    lower = torch.where(row.sequence_index == 1, 0.25, 0.5)
    row = replace(row, inference_logprobs=tri.logprobs.detach() - lower)
    _, metrics = policy_loss(tri, row, token_grpo())
    assert [each.key for each in metrics.responses] == list(row.sequences)
    lengths = torch.bincount(row.sequence_index, minlength=row.num_sequences).tolist()
    assert [each.num for each in metrics.responses] == lengths and len(set(lengths)) > 1
    means = [each.d / each.num for each in metrics.responses]
    expected = [0.25 if q == 1 else 0.5 for q in range(len(means))]
    assert means == pytest.approx(expected, abs=1e-6)
    assert policy_loss(replace(tri, sampled_by=None), row, token_grpo())[1].responses == []


@pytest.mark.parametrize("last_first", [False, True])
def test_responses_are_compared_token_by_token(last_first: bool) -> None:
    tri, row = packed(padded_batch(), "token")
    if last_first:  # the row's last response is the first of its list
        index, last = row.sequence_index, row.num_sequences - 1
        row = replace(row, sequence_index=last - index)
    lower = 0.01 * torch.arange(row.num_loss_tokens)
    row = replace(row, inference_logprobs=tri.logprobs.detach() - lower)
    _, metrics = policy_loss(tri, row, token_grpo())
    assert len(metrics.responses) == row.num_sequences > 1
    for q, each in enumerate(metrics.responses):
        own = lower[row.sequence_index == q].tolist()
        assert own and list(each.by_token) == pytest.approx(own, abs=1e-5)  # float32
        assert each.d == pytest.approx(sum(own), abs=1e-5 * len(own))


def test_dummy_has_a_graph_a_zero_gradient_and_no_metrics() -> None:
    batch = padded_batch()
    tri, micro_batch = packed(batch, "token")
    loss, metrics = policy_loss(tri, replace(micro_batch, is_dummy=True), token_grpo())
    (gradient,) = torch.autograd.grad(loss, batch.policy)
    assert float(loss) == 0 and not gradient.any()
    assert not metrics.sums and not metrics.maxima
