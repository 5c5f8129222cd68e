"""Why the trainer's log-probabilities are not the inference server's, told from their pattern.

Both sides score the same tokens with the same weights, so ``d = trainer - inference`` is rounding
noise per token. Anything else leaves a pattern in a few sums over a batch's tokens of an endpoint
(``recipes/losses.py``; x is the server's log-probability of a token, y the trainer's, H the
entropy of the trainer's distribution):

- *Temperature.* With logits scaled by c, ``x = c y + f(position)`` exactly, and f is nearly linear
  in H: a regression of d on (y, H, 1) explains nearly all of it, and its slope in y is ``1 - c``.
- *Truncation* (top-p, top-k, min-p). ``d = log(probability kept)``: never positive, and the same
  for every token of a position, so with little slope in y; x is exactly 0 where one token is left.
- *Prompt.* A different prompt hits the first tokens of a response most.
- *Weights.* Large, unexplained, everywhere.
- *Dtype.* Small (2e-3 to 5e-2), as often positive as negative, unexplained; the trainer is fp32.
- *Sampling.* The two agree, but the tokens are not drawn from that distribution: ``y + H`` has mean
  zero under it, and is positive if improbable tokens were kept from being sampled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from easyrl.config import Config
from easyrl.engines.base import LogprobComparison

logger = logging.getLogger(__name__)

Cause = Literal["temperature", "truncation", "prompt", "weights", "dtype", "sampling"]

MIN_TOKENS = 256  # fewer show no pattern
# Mean |d| of rounding alone, measured on small models: 3e-7 in float32, 3e-3 to 1e-2 in bf16. The
# limits leave room for larger ones, TF32 and routers that flip.
FLOAT32_NOISE = 2e-3
HALF_PRECISION_NOISE = 5e-2


class Pattern(NamedTuple):
    """What the sums of some tokens say; see the module's docstring for the letters."""

    num_tokens: float
    mean_abs: float  # of d
    slope: float  # of d in y, holding H
    explained: float  # share that (y, H, 1) explain of the variance of d and of x, whichever less
    positive: float  # share of the sum of d² that comes from d > 0
    zeros: float  # share of tokens with x = 0 to which the trainer gives less than 0.999
    first: float  # mean |d| of the first tokens of the responses
    rest: float  # ... of the others
    surplus: float  # mean of y + H in units of its root mean square


def pattern(s: LogprobComparison) -> Pattern:
    """The pattern in sums that were added up over micro-batches and ranks."""
    n = s.num
    mean = np.array([s.y, s.h, s.d]) / n
    second = np.array([[s.yy, s.yh, s.yd], [s.yh, s.hh, s.hd], [s.yd, s.hd, s.dd]])
    covariance = second / n - np.outer(mean, mean)
    # lstsq: entropy or log-probability may be constant
    slopes = np.linalg.lstsq(covariance[:2, :2], covariance[:2, 2], rcond=1e-9)[0]
    # x of an unrelated model does not follow y, and then d = y - x does
    var_y, cov_yd, var_d = covariance[0, 0], covariance[0, 2], covariance[2, 2]
    residual = var_d - slopes @ covariance[:2, 2]
    smaller = min(var_d, var_y - 2 * cov_yd + var_d)
    u_square = (s.yy + 2 * s.yh + s.hh) / n
    return Pattern(
        num_tokens=n,
        mean_abs=s.abs / n,
        slope=float(slopes[0]),
        explained=float(1 - residual / smaller) if smaller > 0 else 0.0,
        positive=s.positive / s.dd if s.dd else 0.0,
        zeros=s.zeros / n,
        first=s.first_abs / max(s.first, 1),
        rest=(s.abs - s.first_abs) / max(n - s.first, 1),
        surplus=float(mean[0] + mean[1]) / math.sqrt(u_square) if u_square > 0 else 0.0,
    )


def diagnose(seen: Pattern, dtype: Literal["fp32", "bf16"]) -> Cause | None:
    """The likely cause of a difference; None if it is noise for a trainer of ``dtype``."""
    if seen.num_tokens < MIN_TOKENS or not all(map(math.isfinite, seen)):
        return None
    if seen.mean_abs > FLOAT32_NOISE and seen.positive < 0.02 and abs(seen.slope) < 0.2:
        return "truncation"
    if seen.zeros > 0.01:
        return "truncation"
    if seen.explained > 0.85 and abs(seen.slope) > 0.02 and seen.mean_abs > FLOAT32_NOISE:
        return "temperature"
    if seen.first > max(3 * seen.rest, HALF_PRECISION_NOISE):
        return "prompt"
    if seen.mean_abs > HALF_PRECISION_NOISE:
        return "temperature" if seen.explained > 0.6 else "weights"
    if seen.mean_abs > FLOAT32_NOISE and dtype == "fp32":
        return "dtype" if 0.42 < seen.positive < 0.58 else "weights"
    if seen.surplus > 0.15 and seen.surplus * math.sqrt(seen.num_tokens) > 8:
        return "sampling"
    return None


class LogprobMismatch:
    """Looks at each batch's comparison and warns of each cause once per run.

    What the configuration asks for is no news: ``rollout.allow_off_policy_sampling`` and
    ``rollout.min_tokens``, which keeps the end of sequence from being sampled.
    """

    def __init__(self, config: Config) -> None:
        rollout = config.rollout
        self._temperature = rollout.temperature
        self._dtype = config.model.dtype
        self._said: set[Cause] = set()
        if rollout.allow_off_policy_sampling:
            self._said |= {"truncation", "sampling", "weights"}
        if rollout.min_tokens > 0:
            self._said |= {"truncation", "sampling"}

    def look(self, compared: Mapping[str, LogprobComparison]) -> Cause | None:
        """The likely cause of what a batch's sums (of all ranks) show; logs each that is new.

        ``compared``: by endpoint's URL. Each endpoint is looked at by itself, and the one that
        differs most is named; where none by itself shows a cause, all are looked at together.
        """
        seen = {url: pattern(sums) for url, sums in compared.items() if sums.num}
        causes = {url: diagnose(of_url, self._dtype) for url, of_url in seen.items()}
        if seen and not any(causes.values()):
            together = LogprobComparison()
            for sums in compared.values():
                together.add(sums)
            whole = ", ".join(sorted(seen))
            seen = {whole: pattern(together)}
            causes = {whole: diagnose(seen[whole], self._dtype)}
        by_difference = sorted(seen, key=lambda url: seen[url].mean_abs, reverse=True)
        found = [(url, cause) for url in by_difference if (cause := causes[url]) is not None]
        for url, cause in found:
            if cause not in self._said:
                self._said.add(cause)
                self._warn(cause, url, seen[url])
        return found[0][1] if found else None

    def _warn(self, cause: Cause, url: str, seen: Pattern) -> None:
        served = self._temperature / (1 - seen.slope) if seen.slope < 1 else math.inf
        logger.warning(
            "the trainer's log-probabilities are not the inference server's (%s, mean difference "
            "%.2g over %d tokens): %s",
            url,
            seen.mean_abs,
            seen.num_tokens,
            _REMEDIES[cause].format(served=served, asked=self._temperature),
        )


_REMEDIES: dict[Cause, str] = {
    "temperature": (
        "the server's look taken at temperature {served:.2f}, rollout.temperature is {asked:g}. "
        "Start the server with --logprobs-mode processed_logprobs (raw ones are before "
        "temperature), and let nothing between override temperature"
    ),
    "truncation": (
        "the server's are higher for every token, as top-p, top-k or min-p make them. Set "
        "rollout.top_p=1, rollout.top_k=-1, rollout.min_p=0, and start the server with "
        "--generation-config vllm, so that it takes no defaults from the model's folder"
    ),
    "prompt": (
        "the first tokens of the responses differ most, so the server saw another prompt. Compare "
        "data.chat_template, data.apply_chat_template and model.tokenizer with the server's "
        "tokenizer and model; a proxy must pass token ids on unchanged"
    ),
    "weights": (
        "the difference is everywhere and unexplained. The server has other weights or another "
        "model than model.path, penalties (rollout.repetition_penalty and its like), or saw "
        "another prompt (data.chat_template); keep weight_sync.prove=true"
    ),
    "dtype": (
        "it is of half precision's size and model.dtype is fp32. Start the server with --dtype "
        "float32 (auto serves float32 models in half precision), or set model.dtype=bf16; if the "
        "server is in float32, its weights are not quite the trainer's"
    ),
    "sampling": (
        "they agree, but improbable tokens are sampled too rarely: the server restricts sampling "
        "(top-p, top-k, min-p) and reports raw log-probabilities. Set rollout.top_p=1, "
        "rollout.top_k=-1, rollout.min_p=0, and start it with --generation-config vllm and "
        "--logprobs-mode processed_logprobs"
    ),
}
