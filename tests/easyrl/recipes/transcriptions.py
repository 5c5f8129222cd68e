"""The published objectives, written down again on padded tensors, and recipes compared with them.

Each formula is plain torch on tensors [B, P, G, T]: B batches of P prompts, G responses each, T
tokens at most; nothing of ``easyrl.recipes`` is used. Advantages, the loss of each batch and its
gradient are compared, in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easyrl.schema import (
    Completion,
    GroupOutputs,
    Prompt,
    RolloutGroup,
    SampleKey,
    Score,
    VersionSpan,
)

NUM_PROMPTS, NUM_GENERATIONS, MAX_TOKENS = 2, 4, 6
WEIGHTS = {"exact": 1.0, "format": 0.25}
ADVANTAGE_TOLERANCE = 1e-5  # some are float32
EXACT = 1e-11  # of those that are not
LOSS_TOLERANCE = 1e-12  # of sums of up to 48 terms; an absolute one for what cancels


@dataclass(frozen=True)
class Batches:
    """B random ragged batches, as padded tensors and as groups."""

    components: Mapping[str, Tensor]  # [B, P, G] each
    lengths: Tensor  # [B, P, G]
    truncated: Tensor  # bool [B, P, G]
    mask: Tensor  # bool [B, P, G, T], tokens that count
    policy: Tensor  # [B, P, G, T], carries gradient, as entropy does
    old: Tensor
    reference: Tensor
    entropy: Tensor
    teacher: Tensor  # of the sampled tokens
    divergence: Tensor  # from the teacher, over the vocabulary; carries gradient
    groups: tuple[tuple[RolloutGroup, ...], ...]  # B times P

    @property
    def rewards(self) -> Tensor:
        """[B, P, G]"""
        return torch.stack([WEIGHTS[name] * r for name, r in self.components.items()]).sum(0)

    @property
    def ratio(self) -> Tensor:
        return torch.exp(self.policy - self.old)

    @property
    def num_trained(self) -> Tensor:
        """[B, P, G], at least 1."""
        return self.mask.sum(-1).clamp(min=1)


def random_batches(
    count: int, seed: int = 0, spread: float = 1.0, num_prompts: int = NUM_PROMPTS
) -> Batches:
    """``spread``: standard deviation of the log ratio; at 1 a tenth of the ratios is above 4."""
    rng = np.random.default_rng(seed)
    responses = (count, num_prompts, NUM_GENERATIONS)
    tokens = (*responses, MAX_TOKENS)
    lengths = rng.integers(1, MAX_TOKENS + 1, responses)
    mask = (np.arange(MAX_TOKENS) < lengths[..., None]) & (rng.random(tokens) < 0.9)
    truncated = (lengths == MAX_TOKENS) & (rng.random(responses) < 0.5)
    components = {
        "exact": rng.integers(0, 2, responses).astype(float),
        "format": rng.integers(0, 3, responses) / 2,
    }
    policy = rng.normal(-3, 1, tokens)
    old, reference = policy - rng.normal(0, spread, tokens), policy - rng.normal(0, 0.4, tokens)
    groups = []
    for b in range(count):
        for p in range(num_prompts):
            own = {name: values[b, p].tolist() for name, values in components.items()}
            completions = tuple(
                _completion(lengths[b, p, g], mask[b, p, g], truncated[b, p, g], old[b, p, g])
                for g in range(NUM_GENERATIONS)
            )
            groups.append(_group(b, p, completions, own))
    rows = [groups[b * num_prompts : (b + 1) * num_prompts] for b in range(count)]
    leaf = {"policy": policy, "entropy": np.abs(rng.normal(0, 1, tokens))}
    frozen = {"old": old, "reference": reference, "mask": mask, "lengths": lengths}
    frozen["teacher"] = policy - rng.normal(0.3, 0.6, tokens)
    leaf["divergence"] = np.abs(rng.normal(0, 0.5, tokens))
    return Batches(
        components={name: torch.from_numpy(values) for name, values in components.items()},
        truncated=torch.from_numpy(truncated),
        groups=tuple(map(tuple, rows)),
        **{name: torch.from_numpy(value).requires_grad_() for name, value in leaf.items()},
        **{name: torch.from_numpy(value) for name, value in frozen.items()},
    )


def _completion(length: int, mask: Any, truncated: bool, logprobs: Any) -> Completion:
    return Completion(
        token_ids=np.zeros(length, dtype=np.int32),
        logprobs=logprobs[:length].astype(np.float32),
        finish_reason="length" if truncated else "stop",
        version_spans=(VersionSpan("run:0:0", 0, int(length)),),
        endpoint="http://127.0.0.1:1",
        loss_mask=mask[:length],
    )


def _group(
    batch: int, index: int, completions: tuple[Completion, ...], own: Mapping[str, list[float]]
) -> RolloutGroup:
    scores = []
    for g in range(len(completions)):
        components = {name: values[g] for name, values in own.items()}
        scores.append(Score(sum(WEIGHTS[n] * v for n, v in components.items()), components))
    prompt = Prompt(index, np.zeros(1, np.int32), text="", answer=None, epoch=batch)
    return RolloutGroup(prompt, completions, tuple(scores), "run:0:0", 0.0, 1.0)


# ---- the formulas --------------------------------------------------------------------------------

Advantages = Callable[[Batches], Tensor]  # [B, P, G], or [B, P, G, T]
Loss = Callable[[Batches, Tensor], Tensor]  # of those advantages, [B, P, G, 1 or T]: [B]


def standardised(values: Tensor, dims: int = 1, eps: float = 1e-4) -> Tensor:
    """Over the last ``dims`` dimensions; sample standard deviation."""
    axes = tuple(range(-dims, 0))
    centred = values - values.mean(axes, keepdim=True)
    return centred / (values.std(axes, keepdim=True) + eps)


def grpo_advantages(b: Batches) -> Tensor:
    return standardised(b.rewards)


def overlong(b: Batches) -> Tensor:
    """DAPO eq. 13 with L_cache = L_max / 2."""
    cache, lengths = MAX_TOKENS / 2, b.lengths.double()
    too_long = ((MAX_TOKENS - cache) - lengths) / cache
    return torch.where(lengths > MAX_TOKENS - cache, too_long, 0.0)


def dapo_advantages(b: Batches) -> Tensor:
    return standardised(b.rewards + overlong(b))


def rloo_advantages(b: Batches) -> Tensor:
    others = [
        torch.cat([b.rewards[..., :i], b.rewards[..., i + 1 :]], -1).mean(-1)
        for i in range(NUM_GENERATIONS)
    ]
    return b.rewards - torch.stack(others, -1)


def over_tokens(values: Tensor, b: Batches) -> Tensor:
    """``values`` [B, P, G], each repeated for its response's tokens, normalised over the batch."""
    dims, count = (1, 2, 3), b.mask.sum((1, 2, 3))
    tokens = values[..., None] * b.mask
    mean = (tokens.sum(dims) / count)[:, None, None]
    square = (values - mean)[..., None].square() * b.mask
    return (values - mean) / ((square.sum(dims) / count).sqrt()[:, None, None] + 1e-8)


def reinforce_pp_advantages(b: Batches) -> Tensor:
    return over_tokens(b.rewards, b)


def reinforce_pp_baseline_advantages(b: Batches) -> Tensor:
    return over_tokens(b.rewards - b.rewards.mean(-1, keepdim=True), b)


def kl_estimates(log_ratio: float) -> dict[str, float]:
    """Schulman 2020, with r = reference / policy."""
    r = np.exp(-log_ratio)
    return {"k1": -np.log(r), "k2": np.log(r) ** 2 / 2, "k3": (r - 1) - np.log(r)}


def normalised_with_kl(b: Batches, rewards: Tensor, coef: float, estimator: str = "k1") -> Tensor:
    """[B, P, G, T], token by token in plain NumPy: ``rewards`` [B, P, G] less the KL of a token and
    of those behind it, normalised over the batch's tokens; zero elsewhere. Sampled and reference
    log-probabilities are float32, as the trainer has them.
    """
    sampled, reference = (x.float().double().numpy() for x in (b.old, b.reference))
    mask, own = b.mask.numpy(), rewards.numpy()
    made = np.zeros(mask.shape)
    for batch in range(len(mask)):
        for p, g in np.ndindex(*own.shape[1:]):
            kl_to_go = 0.0
            for t in reversed(np.flatnonzero(mask[batch, p, g])):
                at = batch, p, g, t
                kl_to_go += kl_estimates(sampled[at] - reference[at])[estimator]
                made[at] = own[batch, p, g] - coef * kl_to_go
        tokens = made[batch][mask[batch]]
        variance = ((tokens - tokens.mean()) ** 2).mean()
        made[batch][mask[batch]] = (tokens - tokens.mean()) / (np.sqrt(variance) + 1e-8)
    return torch.from_numpy(made)


def reinforce_pp_advantages_with_kl(b: Batches) -> Tensor:
    return normalised_with_kl(b, b.rewards, 0.1)


def reinforce_pp_baseline_advantages_with_k3(b: Batches) -> Tensor:
    return normalised_with_kl(b, b.rewards - b.rewards.mean(-1, keepdim=True), 0.2, "k3")


def each_reward_advantages(b: Batches) -> Tensor:
    """GDPO's first step."""
    each = [WEIGHTS[name] * standardised(values) for name, values in b.components.items()]
    return torch.stack(each).sum(0)


def each_reward_and_length_advantages(b: Batches) -> Tensor:
    """Half of the overlong punishment as one more reward."""
    return each_reward_advantages(b) + 0.5 * standardised(overlong(b))


def gdpo_advantages(b: Batches) -> Tensor:
    return standardised(each_reward_advantages(b), dims=2)


def ppo(ratio: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return torch.min(ratio * a, torch.clamp(ratio, 1 - low, 1 + high) * a)


def k3(b: Batches) -> Tensor:
    log_ratio = b.reference - b.policy
    return torch.exp(log_ratio) - log_ratio - 1


def token_mean(values: Tensor, b: Batches) -> Tensor:
    return (values * b.mask).sum((1, 2, 3)) / b.mask.sum((1, 2, 3))


def response_mean(values: Tensor, b: Batches) -> Tensor:
    """Over a response's tokens, then over all responses."""
    return ((values * b.mask).sum(-1) / b.num_trained).mean((1, 2))


def grpo(b: Batches, a: Tensor) -> Tensor:
    return -response_mean(ppo(b.ratio, a, 0.2, 0.2) - 0.04 * k3(b), b)


def grpo_with_k2_in_reward(b: Batches, a: Tensor) -> Tensor:
    k2 = (b.policy - b.reference).square() / 2
    return -response_mean(ppo(b.ratio, a - 0.1 * to_go(k2, b), 0.2, 0.2), b)


def grpo_without_truncated(b: Batches, a: Tensor) -> Tensor:
    trained = b.mask & ~b.truncated[..., None]
    values = ppo(b.ratio, a, 0.2, 0.2) * trained
    return -(values.sum(-1) / trained.sum(-1).clamp(min=1)).mean((1, 2))


def dr_grpo(b: Batches, a: Tensor) -> Tensor:
    return -((ppo(b.ratio, a, 0.2, 0.2) * b.mask).sum(-1) / MAX_TOKENS).mean((1, 2))


def dapo(b: Batches, a: Tensor) -> Tensor:
    return -token_mean(ppo(b.ratio, a, 0.2, 0.28), b)


def sequence_ratio(b: Batches) -> Tensor:
    """[B, P, G, 1]"""
    return torch.exp(((b.policy - b.old) * b.mask).sum(-1) / b.num_trained)[..., None]


def gspo(b: Batches, a: Tensor) -> Tensor:
    """Eq. 5, a term per response; one without a trained token has none."""
    of_response = ppo(sequence_ratio(b), a, 3e-4, 4e-4)[..., 0]
    return -(of_response * b.mask.any(-1)).mean((1, 2))


def gspo_token(b: Batches, a: Tensor) -> Tensor:
    """With a KL of 0.1 in the reward of each token: advantages that differ inside a response."""
    k1 = (b.policy - b.reference).detach() * b.mask
    to_go = k1.flip(-1).cumsum(-1).flip(-1)
    ratio = sequence_ratio(b).detach() * b.policy.exp() / b.policy.exp().detach()
    return -response_mean(ppo(ratio, a - 0.1 * to_go, 3e-4, 4e-4), b)


def cispo(b: Batches, a: Tensor) -> Tensor:
    weight = torch.minimum(b.ratio, torch.tensor(5.0, dtype=torch.float64)).detach()
    return -token_mean(weight * a * b.policy, b)


def cispo_with_lower_bound(b: Batches, a: Tensor) -> Tensor:
    return -token_mean(b.ratio.clamp(0.7, 2.0).detach() * a * b.policy, b)


def rloo(b: Batches, a: Tensor) -> Tensor:
    return rloo_with(b.old - b.reference, b, a)


def rloo_with_k3(b: Batches, a: Tensor) -> Tensor:
    log_ratio = b.reference - b.old
    return rloo_with(torch.exp(log_ratio) - 1 - log_ratio, b, a)


def rloo_with(kl: Tensor, b: Batches, a: Tensor) -> Tensor:
    """``kl`` [B, P, G, T], of each token."""
    kl = (kl * b.mask).sum(-1)
    has_token = b.mask.any(-1)
    num_others = (has_token.sum(-1, keepdim=True) - 1).clamp(min=1)
    others = (kl.sum(-1, keepdim=True) - kl) / num_others
    credit = a[..., 0] - 0.05 * (kl - others)
    return -(credit * (b.policy * b.mask).sum(-1)).mean((1, 2))


def reinforce_pp(b: Batches, a: Tensor) -> Tensor:
    return -token_mean(ppo(b.ratio, a, 0.2, 0.2), b)


def reinforce_pp_baseline(b: Batches, a: Tensor) -> Tensor:
    k2 = (b.policy - b.reference).square() / 2
    return -token_mean(ppo(b.ratio, a, 0.2, 0.2) - 1e-3 * k2, b)


def two_sided(b: Batches, a: Tensor) -> Tensor:
    bounded = torch.where(b.ratio > 4, torch.tensor(4.0, dtype=torch.float64), b.ratio)
    objective = torch.min(bounded * a, torch.clamp(b.ratio, 0.8, 1.2) * a)
    return -token_mean(objective - 0.001 * k3(b) + 1e-4 * b.entropy, b)


def dual_clip(b: Batches, a: Tensor) -> Tensor:
    plain = ppo(b.ratio, a, 0.2, 0.2)
    return -token_mean(torch.where(a < 0, torch.max(plain, 3 * a), plain), b)


def gdpo(b: Batches, a: Tensor) -> Tensor:
    return -response_mean(ppo(b.ratio, a, 0.2, 0.2), b)


def best_and_worst(b: Batches) -> tuple[Tensor, Tensor]:
    """int64 [B, P, 1] each; of responses that score alike the last is the best, the first the
    worst."""
    last = NUM_GENERATIONS - 1 - b.rewards.flip(-1).argmax(-1, keepdim=True)
    return last, b.rewards.argmin(-1, keepdim=True)


def pair_advantages(b: Batches) -> Tensor:
    """The reward margin at the best, its negative at the worst."""
    best, worst = best_and_worst(b)
    margin = b.rewards.max(-1, keepdim=True).values - b.rewards.min(-1, keepdim=True).values
    return torch.zeros_like(b.rewards).scatter(-1, best, margin).scatter(-1, worst, -margin)


def pair_mean(b: Batches, beta: float, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Mean over prompts of ``loss`` of both margins [B, P]; 0 where there is no pair, or no token
    of it that counts."""
    best, worst = best_and_worst(b)
    log_ratios = ((b.policy - b.reference) * b.mask).sum(-1)
    implicit = beta * (log_ratios.gather(-1, best) - log_ratios.gather(-1, worst))[..., 0]
    explicit = b.rewards.max(-1).values - b.rewards.min(-1).values
    has_token = b.mask.any(-1).gather(-1, best) | b.mask.any(-1).gather(-1, worst)
    counts = (explicit > 0) & has_token[..., 0]
    return torch.where(counts, loss(implicit, explicit), 0.0).mean(1)


def online_dpo(b: Batches, a: Tensor) -> Tensor:
    """DPO eq. 7."""
    return pair_mean(b, 0.1, lambda implicit, _: -torch.log(1 / (1 + torch.exp(-implicit))))


def online_cdpo(b: Batches, a: Tensor) -> Tensor:
    """With a tenth of the preferences the wrong way round."""
    return pair_mean(
        b, 0.5, lambda m, _: -(0.9 * torch.sigmoid(m).log() + 0.1 * torch.sigmoid(-m).log())
    )


def rpo(beta: float, scale: float) -> Loss:
    """KL of two Bernoulli distributions, the rewards' and the policy's."""

    def distance(implicit: Tensor, explicit: Tensor) -> Tensor:
        p, q = torch.sigmoid(scale * explicit), torch.sigmoid(implicit)
        return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))

    return lambda b, a: pair_mean(b, beta, distance)


def to_go(values: Tensor, b: Batches) -> Tensor:
    """At each token the sum of ``values`` from it to the end of its response."""
    return (values.detach() * b.mask).flip(-1).cumsum(-1).flip(-1)


def no_advantages(b: Batches) -> Tensor:
    return torch.zeros_like(b.rewards)


def log_ratio_to_teacher(b: Batches) -> Tensor:
    return (b.policy - b.teacher).detach()


def distillation(b: Batches, a: Tensor) -> Tensor:
    return token_mean(b.ratio * log_ratio_to_teacher(b), b)


def distillation_of_responses(b: Batches, a: Tensor) -> Tensor:
    return response_mean(b.ratio * log_ratio_to_teacher(b), b)


def distillation_with_later_tokens(b: Batches, a: Tensor) -> Tensor:
    return token_mean(b.ratio * to_go(log_ratio_to_teacher(b), b), b)


def full_distillation(b: Batches, a: Tensor) -> Tensor:
    return response_mean(b.divergence, b)


def full_distillation_with_later_tokens(b: Batches, a: Tensor) -> Tensor:
    behind = to_go(b.divergence, b) - (b.divergence * b.mask).detach()
    return token_mean(b.divergence + b.ratio * behind, b)


@dataclass(frozen=True)
class Case:
    """A recipe with ``settings``, and what it has to equal."""

    recipe: str
    advantages: Advantages
    loss: Loss
    settings: Mapping[str, Any] = field(default_factory=dict)
    bounds: tuple[str, ...] = ("clip_low_sum", "clip_high_sum")  # metrics that must not be zero
    tolerance: float = LOSS_TOLERANCE
    advantage_tolerance: float = ADVANTAGE_TOLERANCE


PAIRS = ("accuracy_sum", "chosen_reward_num", "margin_num")
OF_TEACHER: dict[str, Any] = {"teacher": Path("teacher")}  # never opened: its numbers are given

CASES = {
    "grpo": Case("grpo", grpo_advantages, grpo),
    "grpo, truncated masked": Case(
        "grpo", grpo_advantages, grpo_without_truncated, {"mask_truncated": True, "kl_coef": 0.0}
    ),
    "grpo, k2 in the reward": Case(
        "grpo",
        grpo_advantages,
        grpo_with_k2_in_reward,
        {"kl_in_reward_coef": 0.1, "kl_in_reward_estimator": "k2", "kl_coef": 0.0},
        tolerance=1e-11,  # differences of a running sum over 20,000 tokens
    ),
    "grpo, each reward": Case(
        "grpo",
        each_reward_advantages,
        grpo,
        {"advantage": "each_reward_std"},
        advantage_tolerance=EXACT,
    ),
    "dr_grpo": Case("dr_grpo", lambda b: b.rewards - b.rewards.mean(-1, keepdim=True), dr_grpo),
    "dapo": Case("dapo", dapo_advantages, dapo, {"overlong_buffer": 0.5}),
    "dapo, each reward": Case(
        "dapo",
        each_reward_and_length_advantages,
        dapo,
        {"advantage": "each_reward_std", "overlong_buffer": 0.5, "overlong_penalty": 0.5},
        advantage_tolerance=EXACT,
    ),
    "gspo": Case("gspo", grpo_advantages, gspo),
    "gspo_token": Case("gspo_token", grpo_advantages, gspo_token, {"kl_in_reward_coef": 0.1}),
    "cispo": Case("cispo", grpo_advantages, cispo, bounds=("clip_high_sum",)),
    "cispo, lower bound": Case(
        "cispo",
        grpo_advantages,
        cispo_with_lower_bound,
        {"clip_eps_low": 0.3, "clip_eps_high": 1.0},
    ),
    "rloo": Case("rloo", rloo_advantages, rloo, bounds=()),
    "rloo, k3 in the reward": Case(
        "rloo", rloo_advantages, rloo_with_k3, {"kl_in_reward_estimator": "k3"}, ()
    ),
    "reinforce_pp": Case("reinforce_pp", reinforce_pp_advantages, reinforce_pp),
    "reinforce_pp_baseline": Case(
        "reinforce_pp_baseline", reinforce_pp_baseline_advantages, reinforce_pp_baseline
    ),
    "reinforce_pp, KL in the reward": Case(
        "reinforce_pp",
        reinforce_pp_advantages_with_kl,
        reinforce_pp,
        {"kl_in_reward_coef": 0.1},
        advantage_tolerance=EXACT,
    ),
    "reinforce_pp_baseline, k3 in the reward": Case(
        "reinforce_pp_baseline",
        reinforce_pp_baseline_advantages_with_k3,
        reinforce_pp_baseline,
        {"kl_in_reward_coef": 0.2, "kl_in_reward_estimator": "k3"},
        advantage_tolerance=EXACT,
    ),
    "two_sided": Case(
        "two_sided",
        grpo_advantages,
        two_sided,
        bounds=("clip_low_sum", "clip_high_sum", "clip_delta_sum"),
    ),
    "two_sided, each reward": Case(
        "two_sided",
        each_reward_advantages,
        two_sided,
        {"advantage": "each_reward_std"},
        ("clip_low_sum", "clip_high_sum", "clip_delta_sum"),
        advantage_tolerance=EXACT,
    ),
    "dual_clip": Case(
        "dual_clip",
        grpo_advantages,
        dual_clip,
        bounds=("clip_low_sum", "clip_high_sum", "clip_dual_sum"),
    ),
    "gdpo": Case("gdpo", gdpo_advantages, gdpo),
    "turn_grpo": Case("turn_grpo", grpo_advantages, grpo),  # without turn rewards
    "online_dpo": Case("online_dpo", pair_advantages, online_dpo, bounds=PAIRS),
    "online_dpo, smoothed": Case(
        "online_dpo", pair_advantages, online_cdpo, {"beta": 0.5, "label_smoothing": 0.1}, PAIRS
    ),
    "rpo": Case("rpo", pair_advantages, rpo(1e-5, 3.0), bounds=PAIRS),
    "rpo, larger beta": Case(
        "rpo", pair_advantages, rpo(0.4, 1.5), {"beta": 0.4, "reward_scale": 1.5}, PAIRS
    ),
    "distillation": Case("distillation", no_advantages, distillation, OF_TEACHER, ()),
    "distillation, mean of responses": Case(
        *("distillation", no_advantages, distillation_of_responses),
        OF_TEACHER | {"aggregation": "sequence"},
        (),
    ),
    "distillation, later tokens": Case(
        *("distillation", no_advantages, distillation_with_later_tokens),
        OF_TEACHER | {"credit": "sequence"},
        (),
    ),
    "distillation, full": Case(
        *("distillation", no_advantages, full_distillation),
        OF_TEACHER | {"divergence": "full", "aggregation": "sequence"},
        (),
    ),
    "distillation, full, later tokens": Case(
        *("distillation", no_advantages, full_distillation_with_later_tokens),
        OF_TEACHER | {"divergence": "full", "credit": "sequence"},
        (),
        1e-11,  # differences of a running sum over 20,000 tokens, zero at a response's end
    ),
}


# ---- recipes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """All batches' trained tokens as one row."""

    terms: Any  # of the module's ``Terms``
    logprobs: Tensor  # [n], of Batches.policy; carries gradient, as entropy does
    entropy: Tensor  # [n]
    batch: Tensor  # int64 [n], which of the B batches
    denominators: Tensor  # [B]
    places: tuple[Tensor, ...]  # four times int64 [n], into [B, P, G, T]

    def batch_of(self, terms: Tensor) -> Tensor:
        """int64, which batch each term of the loss is of: one of a token, or of a group."""
        if len(terms) == len(self.batch):
            return self.batch
        groups = self.terms.group_index
        return self.batch.new_zeros(len(terms)).index_put((groups,), self.batch)


def packed(recipes: ModuleType, recipe: Any, batches: Batches) -> Packed:
    """What ``recipe``, of the package ``recipes``, makes of ``batches``."""
    interface, finished = (import_module(f"{recipes.__name__}.{n}") for n in ("recipe", "groups"))
    run = interface.RunSettings(MAX_TOKENS, NUM_GENERATIONS, 1.0, 0, WEIGHTS)
    advantages, weights, sequence_index, denominators = [], [], [], []
    sequences: list[SampleKey] = []
    places: list[np.ndarray] = []
    for b, groups in enumerate(batches.groups):
        said = [_said_of(group, batches.reference[b, p]) for p, group in enumerate(groups)]
        pairs = zip(groups, said, strict=True)
        shared = [finished.group_statistics(recipe, run, *pair) for pair in pairs]
        for p, group in enumerate(finished.trained_groups(recipe, run, groups, shared, said)):
            for response in group.responses:
                size = len(response.tokens)
                own = np.array([b, p, response.sample])[:, None].repeat(size, axis=1)
                places.append(np.concatenate([own, response.tokens[None]]))
                advantages.append(response.advantages.astype(np.float64))
                weights.append(response.loss_weights.astype(np.float64))
                sequence_index.append(np.full(size, len(sequences)))
                sequences.append(SampleKey(b, p, response.sample))
        denominators.append(recipe.denominator(groups, run))
    at = tuple(torch.from_numpy(each) for each in np.concatenate(places, axis=1))
    teacher = recipe.needs.teacher
    terms = interface.Terms(
        advantages=torch.from_numpy(np.concatenate(advantages)),
        loss_weights=torch.from_numpy(np.concatenate(weights)),
        inference_logprobs=batches.old[at],
        old_logprobs=batches.old[at],
        reference_logprobs=batches.reference[at] if recipe.needs.reference else None,
        sequence_index=torch.from_numpy(np.concatenate(sequence_index)),
        sequences=tuple(sequences),
        teacher_logprobs=None if teacher is None or teacher.full else batches.teacher[at],
        teacher_kl=None if teacher is None or not teacher.full else batches.divergence[at],
    )
    return Packed(
        terms, batches.policy[at], batches.entropy[at], at[0], torch.tensor(denominators), at
    )


def _said_of(group: RolloutGroup, reference: Tensor) -> GroupOutputs:
    """What the reference says of a group, of its ``reference`` [G, T]."""
    own = reference.numpy().astype(np.float32)
    lengths = [len(completion.token_ids) for completion in group.completions]
    return GroupOutputs((), tuple(own[g, :length] for g, length in enumerate(lengths)))


def check_recipe(recipes: ModuleType, case: Case, batches: Batches) -> dict[str, float]:
    """Its metrics. Raises ``AssertionError`` where ``case`` is not its formula.

    ``recipes``: the package ``easyrl.recipes``, or a copy of it.
    """
    loading = import_module(f"{recipes.__name__}.loading")
    recipe = loading.BUILT_IN[case.recipe](**case.settings)
    row = packed(recipes, recipe, batches)
    expected = case.advantages(batches)
    got = expected.clone()
    got[row.places[: expected.ndim]] = row.terms.advantages
    close = {"rtol": case.advantage_tolerance, "atol": case.advantage_tolerance}
    torch.testing.assert_close(got, expected, **close)
    got = got if got.ndim == 4 else got[..., None]
    terms = recipe.loss(row.logprobs, row.entropy, row.terms)
    sums = terms.new_zeros(len(batches.groups)).index_add(0, row.batch_of(terms), terms)
    losses, formula = sums / row.denominators, case.loss(batches, got)
    leaves = [batches.policy, batches.entropy, batches.divergence]
    options = {"allow_unused": True, "materialize_grads": True}
    close = {"rtol": case.tolerance, "atol": case.tolerance}
    torch.testing.assert_close(losses, formula, **close)
    for ours, theirs in zip(
        torch.autograd.grad(losses.sum(), leaves, **options),
        torch.autograd.grad(formula.sum(), leaves, **options),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, **close)
    metrics = recipe.metrics(row.logprobs.detach(), row.entropy.detach(), row.terms)
    return {name: float(value) for name, value in metrics.items()}
