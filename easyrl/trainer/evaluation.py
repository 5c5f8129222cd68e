"""Evaluation on held-out prompts: pass@k and avg@k."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import comb, fsum
from typing import Protocol

from easyrl.config import EvaluationConfig
from easyrl.ledger.exclusions import ExclusionLimit
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.schedule import Due
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import ExcludedPrompt, PolicyVersion, Prompt, RolloutGroup, TooManyExcluded


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of P(one of k samples is correct) (Chen et al. 2021, eq. 1)."""
    assert 1 <= k <= num_samples and 0 <= num_correct <= num_samples
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


class ScheduledEvaluation:
    """Evaluates every so many steps, and at start and end where that is wanted. Collective."""

    def __init__(self, evaluator: Evaluator, step: int) -> None:
        self._evaluator = evaluator
        self._due = Due(evaluator.config.every_steps, step)

    def evaluate(self, step: int, version: PolicyVersion, *, is_last: bool) -> dict[str, float]:
        """Metrics of the endpoints' present weights; none if no evaluation is due."""
        config = self._evaluator.config
        wanted = self._due.passes(step)
        wanted |= (step == 0 and config.at_start) or (is_last and config.at_end)
        return self._evaluator.evaluate(str(version)) if wanted else {}


class Groups(Protocol):
    """Finished groups, in order of completion (``GroupStream``)."""

    def __iter__(self) -> Iterator[RolloutGroup]: ...
    def interrupt(self, error: BaseException) -> None: ...
    def close(self) -> None: ...


class Rollouts(Protocol):
    """Generates every prompt's group (``RolloutGenerator``)."""

    def produce(self, prompts: Sequence[Prompt], version: str | None) -> Groups: ...


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Samples every held-out prompt several times and counts the correct responses."""

    config: EvaluationConfig
    prompts: Sequence[Prompt]
    rollouts: Rollouts
    is_interruption: Callable[[Exception], bool]  # nothing is wrong: an outage, a stop
    collectives: Collectives
    stop: StopRequest
    reward_name: str  # the component that decides
    max_excluded: float = 1.0  # data.max_excluded, of all prompts together

    def evaluate(self, version: str | None) -> dict[str, float]:
        """``eval/avg@k`` (also ``eval/accuracy``) and ``eval/pass@k``, all ranks. Collective.

        A prompt that nobody can answer counts as not solved, and in ``eval/excluded``. Raises on
        all ranks what keeps one of them from going on: an outage, ``StopRequested``; and
        ``TooManyExcluded``.
        """
        share = self.prompts[self.collectives.ranks.rank :: self.collectives.ranks.world_size]
        correct: list[int] = []
        excluded: list[tuple[int, str, str]] = []  # index, kind, reason
        interruption: Exception | None = None
        groups = self.rollouts.produce(share, version)
        try:
            with self.stop.wakes(groups.interrupt):
                for group in groups:
                    if group.excluded is not None:
                        excluded.append((group.prompt.index, *group.excluded))
                    scores = [score.components[self.reward_name] for score in group.scores]
                    correct.append(sum(score >= self.config.threshold for score in scores))
        except Exception as error:
            groups.close()
            if not self.is_interruption(error):
                raise
            interruption = error
        self.collectives.end_together(interruption)
        everyone = [c for rank in self.collectives.all_gather(correct) for c in rank]
        num_excluded = self._check_excluded(excluded)
        num_prompts = len(everyone)
        num_samples = self.config.num_samples
        accuracy = sum(everyone) / (num_prompts * num_samples)
        metrics = {"eval/accuracy": accuracy, f"eval/avg@{num_samples}": accuracy}
        metrics["eval/excluded"] = float(num_excluded)
        for k in self.config.pass_at:
            total = fsum(pass_at_k(num_samples, c, k) for c in everyone)  # in any order
            metrics[f"eval/pass@{k}"] = total / num_prompts
        return metrics

    def _check_excluded(self, mine: Sequence[tuple[int, str, str]]) -> int:
        """The number of excluded prompts of all ranks. Raises ``TooManyExcluded``. Collective."""
        told = [each for rank in self.collectives.all_gather(list(mine)) for each in rank]
        refused = [ExcludedPrompt(i, 0, i, reason) for i, kind, reason in told if kind == "refused"]
        limit = ExclusionLimit(
            self.max_excluded,
            len(self.prompts),
            refused,
            location=lambda e: self.prompts[e.position].location or f"prompt {e.position}",
        )
        if (problem := limit.problem()) is not None:
            raise TooManyExcluded(f"evaluation: {problem}")
        return len(told)
