"""The rules of the collapse alarms: what each looks at, its source, and which setting helps.

Published runs say which figures move before a run collapses, hardly one from where on. Thresholds
that no source is given for are this project's choice, all are defaults of the section ``alarms``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from easyrl.metrics.alarms.history import History

# An entropy that has lost less of what the run began with has not fallen, so cannot rebound.
FALLEN = 1 / 3
# Growth is taken from here on, where a run begins with less: the share of clipped tokens is zero
# where the ratio is 1, and rounding alone makes a mean |Δ log-prob| of 3e-3 in half precision.
CLIP_FRACTION_FLOOR = 0.01
LOGPROB_DIFF_FLOOR = 3e-3  # nats

REWARD = "reward/mean"


class Measured(NamedTuple):
    """What a rule has found in a history."""

    value: float  # that is compared with the threshold
    now: float  # the figure's median of the last window, or the share of it that counts
    before: float = 0.0  # what it is compared with, of the run's first window where not said


@dataclass(frozen=True)
class Rule:
    """One collapse alarm."""

    name: str  # of its threshold in the section ``alarms``, its metric alarm/NAME and its event
    figure: str  # that it looks at (``history.figure``)
    measure: Callable[[History], Measured | None]  # None: cannot be judged now, all stays as it is
    side: Literal["above", "below"]  # of the threshold, where the alarm is raised
    when: str  # the condition, in words
    says: str  # the same with the fields of ``Measured`` and ``threshold`` to fill in
    source: str
    remedy: str

    def is_beyond(self, value: float, threshold: float) -> bool:
        """Whether the alarm is to be raised."""
        return value >= threshold if self.side == "above" else value <= threshold


def _remaining(history: History, name: str) -> Measured | None:
    now, before = history[name].last, history[name].first
    if now is None or before is None or before <= 0:
        return None
    return Measured(now / before, now, before)


def _growth(history: History, name: str, floor: float = 0.0) -> Measured | None:
    now, before = history[name].last, history[name].first
    if now is None or before is None or max(before, floor) <= 0:
        return None
    return Measured(now / max(before, floor), now, before)


def _rise(history: History, name: str) -> Measured | None:
    now, before = history[name].last, history[name].first
    if now is None or before is None:
        return None
    return Measured(now - before, now, before)


def _level(history: History, name: str) -> Measured | None:
    now = history[name].last
    return None if now is None else Measured(now, now)


def _entropy_collapse(history: History) -> Measured | None:
    return None if history[REWARD].is_at_best else _remaining(history, "policy/entropy")


def _entropy_rebound(history: History) -> Measured | None:
    entropy = history["policy/entropy"]
    now, first, lowest = entropy.last, entropy.first, entropy.lowest
    if now is None or first is None or lowest is None or first - lowest < FALLEN * first:
        return None
    fallen = first - lowest
    return Measured((now - lowest) / fallen, now, lowest) if fallen > 0 else None


def _length_collapse(history: History) -> Measured | None:
    now, before = history[REWARD].last, history[REWARD].first
    if now is None or before is None or now > before:
        return None
    return _remaining(history, "response/mean_tokens")


RULES: tuple[Rule, ...] = (
    Rule(
        name="entropy_collapse",
        figure="policy/entropy",
        measure=_entropy_collapse,
        side="below",
        when="a tenth of its first window or less is left, and the reward is at no new best",
        says=(
            "the policy's entropy is {now:.3g} nats, {value:.2g} of the {before:.3g} that the run "
            "began with (limit {threshold:g}), and the reward is at no new best"
        ),
        source=(
            "DAPO (arXiv 2503.14476, §3.1) and Skywork-OR1 (arXiv 2505.22312): entropy that "
            "collapses early ends exploration and costs test performance; the threshold is ours"
        ),
        remedy=(
            "set a small recipe.entropy_coef (INTELLECT-2: 1e-4) or, with "
            "trainer.updates_per_batch above 1, raise recipe.clip_eps_high (DAPO: 0.28)"
        ),
    ),
    Rule(
        name="entropy_rebound",
        figure="policy/entropy",
        measure=_entropy_rebound,
        side="above",
        when="half of what it has fallen is regained, after it had fallen by a third or more",
        says=(
            "the policy's entropy has risen from {before:.3g} to {now:.3g} nats and regained "
            "{value:.2g} of what it had fallen (limit {threshold:g})"
        ),
        source=(
            "INTELLECT-2 (arXiv 2505.07291, §3.5, fig. 10): entropy that falls and rises again "
            "came shortly before every collapse; the threshold is ours"
        ),
        remedy=(
            "go back to a checkpoint from before the rise and set trainer.max_grad_norm to 0.1 or "
            "less, lower trainer.learning_rate, or lower recipe.entropy_coef if it is above 0"
        ),
    ),
    Rule(
        name="length_collapse",
        figure="response/mean_tokens",
        measure=_length_collapse,
        side="below",
        when="half of its first window or less is left, and the reward is no higher than at first",
        says=(
            "responses have {now:.4g} tokens, {value:.2g} of the {before:.4g} that the run began "
            "with (limit {threshold:g}), and the reward is no higher"
        ),
        source=(
            "DAPO (arXiv 2503.14476) watches the length of responses as a sign of stability; the "
            "threshold is ours"
        ),
        remedy=(
            "look at what short responses are rewarded for; recipe.aggregation=constant takes the "
            "weight from short correct ones (Dr. GRPO), a lower recipe.overlong_penalty the "
            "punishment from long ones"
        ),
    ),
    Rule(
        name="truncation",
        figure="response/truncated",
        measure=lambda history: _rise(history, "response/truncated"),
        side="above",
        when="the share of responses cut off at `rollout.max_tokens` has risen by a quarter",
        says=(
            "{now:.0%} of the responses are cut off at rollout.max_tokens, {before:.0%} were at "
            "first (limit {threshold:.0%} more)"
        ),
        source=(
            "DAPO (arXiv 2503.14476, §3.4): the reward of responses that are cut off is noise; "
            "the threshold is ours"
        ),
        remedy=(
            "raise rollout.max_tokens, set recipe.mask_truncated=true, or punish length before the "
            "cut with recipe.name=dapo and its recipe.overlong_buffer"
        ),
    ),
    Rule(
        name="no_signal",
        figure="no_signal",
        measure=lambda history: _level(history, "no_signal"),
        side="above",
        when="three quarters of the groups or more have equal rewards, or are rejected",
        says=(
            "{now:.0%} of the groups have equal rewards or are rejected, and teach nothing "
            "(limit {threshold:.0%})"
        ),
        source=(
            "DAPO (arXiv 2503.14476, §3.2): groups of equal rewards have no gradient, and become "
            "more as a run goes on; the threshold is ours"
        ),
        remedy=(
            "choose prompts that are neither solved nor hopeless, raise rollout.num_generations, "
            "or have such groups replaced with recipe.name=dapo (recipe.dynamic_sampling=true)"
        ),
    ),
    Rule(
        name="kl",
        figure="policy/kl",
        measure=lambda history: _level(history, "policy/kl"),
        side="above",
        when="half a nat per token or more to the reference; only with one",
        says=(
            "the KL to the reference is {now:.3g} nats per token (limit {threshold:g}): the policy "
            "has left the model that it began as"
        ),
        source="metric as in TRL (`kl`) and verl; the threshold is ours",
        remedy="raise recipe.kl_coef, or lower trainer.learning_rate",
    ),
    Rule(
        name="clip_fraction",
        figure="clip_fraction",
        measure=lambda history: _growth(history, "clip_fraction", CLIP_FRACTION_FLOOR),
        side="above",
        when="five times its first window, or five times 0.01 where that was less",
        says=(
            "{now:.1%} of the tokens are clipped, {before:.1%} were at first (limit {threshold:g} "
            "times as many, and of 1% where that is more)"
        ),
        source=(
            "INTELLECT-2 (arXiv 2505.07291, §3.5, fig. 9b): the share of clipped tokens rises "
            "with the gradient's norm in runs that diverge; the threshold is ours"
        ),
        remedy="lower trainer.updates_per_batch or trainer.learning_rate",
    ),
    Rule(
        name="grad_norm",
        figure="grad_norm",
        measure=lambda history: _growth(history, "grad_norm"),
        side="above",
        when="three times its first window, before the clip",
        says=(
            "the gradient's norm is {now:.3g}, {value:.2g} times the {before:.3g} that the run "
            "began with (limit {threshold:g})"
        ),
        source=(
            "INTELLECT-2 (arXiv 2505.07291, §3.5, fig. 9a): a slow, lasting growth comes before "
            "the collapse; the threshold is ours"
        ),
        remedy="set trainer.max_grad_norm to 0.1 or 0.05 (INTELLECT-2), or lower "
        "trainer.learning_rate",
    ),
    Rule(
        name="repetition",
        figure="response/repetition",
        measure=lambda history: _rise(history, "response/repetition"),
        side="above",
        when="the share of repeated n-grams has risen by a fifth",
        says=(
            "{now:.0%} of the responses' n-grams are repetitions, {before:.0%} were at first "
            "(limit {threshold:.0%} more)"
        ),
        source=(
            "Demystifying Long Chain-of-Thought (arXiv 2502.03373): responses repeat themselves "
            "to become long; n-gram length and threshold are ours"
        ),
        remedy=(
            "add the reward repetition to the section rewards, and let responses that run into the "
            "limit lose: scoring.truncated_reward=0, recipe.mask_truncated=false"
        ),
    ),
    Rule(
        name="logprob_diff",
        figure="policy/logprob_diff",
        measure=lambda history: _growth(history, "policy/logprob_diff", LOGPROB_DIFF_FLOOR),
        side="above",
        when="three times its first window, or three times 3e-3 nats where that was less",
        says=(
            "trainer and inference server differ by {now:.2g} nats in the mean log-probability of "
            "a token, {before:.2g} at first (limit {threshold:g} times as much, and 0.003 where "
            "that is more)"
        ),
        source=(
            "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL "
            "Training; Liu, Li et al. 2025, When Speed Kills Stability; the threshold is ours"
        ),
        remedy=(
            "set recipe.importance_correction=truncated, and serve with the dtype of the trainer "
            "(model.dtype)"
        ),
    ),
)
FIGURES: tuple[str, ...] = tuple(dict.fromkeys([REWARD, *(rule.figure for rule in RULES)]))
