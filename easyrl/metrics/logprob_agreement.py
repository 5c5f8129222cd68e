"""Limit on an endpoint's mean |Δ log-prob| against the trainer, over a batch's trained tokens.

Endpoint and trainer score the same tokens with the same weights, so what is between them is
rounding. Beyond the limit the tokens were made by something else, whatever stamp and proof say, and
count as those of an endpoint that has failed its proof (docs/endpoints.md).

*Mean, not maximum.* In bf16, and where a router of a mixture of experts flips, single tokens differ
by nats while the mean stays small.

*The limits* are constants; nothing is calibrated on the run, whose endpoints may all be wrong.
bf16: 0.2 nats. There the mean importance ratio has left PPO's clip range, 1 ± 0.2 (Schulman et al.
2017): what the field calls off-policy. Rounding is an order of magnitude below: means of 3e-3 to
3e-2 were measured with bf16. fp32: an eighth of that, 2.5e-2; a GPU may multiply in TF32, whose
mantissa is 3 bits longer than that of bf16. On CPUs means of 3e-7 were measured. A stale tied head
is off by nats, a temperature of 0.9 instead of 1 by some 0.05; one optimizer step at a learning
rate of 1e-6 by 4e-4, which only the proof of the bits can see.

*Few tokens* show little: the mean is taken over ``MIN_TOKENS`` at least, as if those that are
missing agreed. So a few outliers condemn nobody, and a sum that is once too large for
``MIN_TOKENS`` stays so until there are more: the running mean can be judged at any time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from easyrl.config import Config
from easyrl.engines.base import LogprobComparison
from easyrl.schema import EndpointAgreement

LIMITS = {"fp32": 2.5e-2, "bf16": 0.2}  # nats, by model.dtype
MIN_TOKENS = 128


def agreement_limit(config: Config) -> float | None:
    """The limit that a run's endpoints are held to, nats; None: they are not judged.

    Samples of another distribution than the policy's, which the configuration has asked for, come
    with other log-probabilities than the policy's.
    """
    if config.weight_sync.agreement_tolerance is not None:
        return config.weight_sync.agreement_tolerance
    if config.rollout.allow_off_policy_sampling:
        return None
    return LIMITS[config.model.dtype]


def not_judged(config: Config) -> str | None:
    """What a run says once at its start where its endpoints' log-probabilities have no limit."""
    if agreement_limit(config) is not None:
        return None
    return (
        "rollout.allow_off_policy_sampling: how far endpoints' log-probabilities are from the "
        "trainer's is written down and not judged; set weight_sync.agreement_tolerance to hold "
        "them to a limit"
    )


def agreement(compared: Mapping[str, LogprobComparison]) -> list[EndpointAgreement]:
    """Each endpoint's agreement, sorted by URL."""
    return [
        EndpointAgreement(url, int(sums.num), _finite(sums.abs / sums.num), _finite(sums.maximum))
        for url, sums in sorted(compared.items())
        if sums.num
    ]


def disagreement(seen: EndpointAgreement, limit: float) -> str | None:
    """What is wrong with an endpoint's log-probabilities, in words and numbers."""
    if seen.mean is None or seen.maximum is None:
        return f"log-probabilities of its {seen.num_tokens} trained tokens are not finite"
    if seen.mean * seen.num_tokens <= limit * max(seen.num_tokens, MIN_TOKENS):
        return None
    return (
        f"log-probabilities differ from the trainer's by {seen.mean:.2g} nats in the mean of "
        f"{seen.num_tokens} trained tokens (maximum {seen.maximum:.2g}, limit {limit:g})"
    )


def disagreements(seen: Sequence[EndpointAgreement], limit: float | None) -> dict[str, str]:
    """``disagreement`` of those that are over the ``limit``, by URL."""
    if limit is None:
        return {}
    problems = {each.url: disagreement(each, limit) for each in seen}
    return {url: problem for url, problem in problems.items() if problem is not None}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
