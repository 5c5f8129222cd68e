"""A set of held-out prompts, and what is counted of its responses: pass@k and avg@k."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb, fsum
from typing import NamedTuple, Protocol

from easyrl.config import EvaluationSetConfig, set_key
from easyrl.ledger.exclusions import ExclusionLimit
from easyrl.runtime.collectives import Collectives
from easyrl.schema import ExcludedPrompt, Exclusion, Prompt, RolloutGroup, Score, TooManyExcluded


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of P(one of k samples is correct) (Chen et al. 2021, eq. 1)."""
    assert 1 <= k <= num_samples and 0 <= num_correct <= num_samples
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


class Groups(Protocol):
    """Finished groups, in order of completion (``GroupStream``)."""

    @property
    def waiting(self) -> int:
        """Those that are finished and not handed out. From any thread."""

    def __iter__(self) -> Iterator[RolloutGroup]: ...
    def interrupt(self, error: BaseException) -> None: ...
    def close(self) -> None: ...


class Rollouts(Protocol):
    """Generates every prompt's group (``RolloutGenerator``)."""

    def produce(self, prompts: Sequence[Prompt], version: str | None) -> Groups: ...


class Judged(NamedTuple):
    """What counts of a finished group."""

    num_correct: int
    excluded: Exclusion | None
    made_by: tuple[tuple[str, int], ...]  # of each response: endpoint and number of its proof


@dataclass(frozen=True, slots=True)
class HeldOutSet:
    """Held-out prompts, how they are answered, and which responses are correct."""

    name: str  # empty: the only one
    config: EvaluationSetConfig
    prompts: Sequence[Prompt]
    rollouts: Rollouts
    reward_name: str | None  # the component that decides; None: the reward, as of an episode
    max_excluded: float = 1.0  # data.max_excluded, of all prompts together

    def judge(self, group: RolloutGroup) -> Judged:
        """What counts of a finished group."""
        said = [self._said(score) for score in group.scores]
        return Judged(
            sum(score is not None and score >= self.config.threshold for score in said),
            group.excluded,
            tuple(made for c in group.completions for made in c.made_by),
        )

    def _said(self, score: Score) -> float | None:
        """What decides whether a sample is correct; None: it is not."""
        if self.reward_name is not None:
            return score.components.get(self.reward_name)
        return None if score.failed else score.reward

    def metrics(self, judged: Mapping[int, Judged], collectives: Collectives) -> dict[str, float]:
        """``eval/NAME/…``, or ``eval/…`` of the only set: of this rank's ``judged`` groups by
        prompt, all ranks. Raises ``TooManyExcluded``. Collective."""
        correct = [each.num_correct for each in judged.values()]
        everyone = [c for of_rank in collectives.all_gather(correct) for c in of_rank]
        excluded = [(i, *each.excluded) for i, each in judged.items() if each.excluded is not None]
        num_excluded = self._check_excluded(excluded, collectives)
        num_prompts, num_samples = len(everyone), self.config.num_samples
        accuracy = sum(everyone) / (num_prompts * num_samples)
        prefix = f"eval/{self.name}/" if self.name else "eval/"
        metrics = {f"{prefix}accuracy": accuracy, f"{prefix}avg@{num_samples}": accuracy}
        metrics[f"{prefix}excluded"] = float(num_excluded)
        for k in self.config.pass_at:
            total = fsum(pass_at_k(num_samples, c, k) for c in everyone)  # in any order
            metrics[f"{prefix}pass@{k}"] = total / num_prompts
        return metrics

    def _check_excluded(
        self, mine: Sequence[tuple[int, str, str]], collectives: Collectives
    ) -> int:
        """The number of excluded prompts of all ranks. Raises ``TooManyExcluded``. Collective."""
        told = [each for rank in collectives.all_gather(list(mine)) for each in rank]
        refused = [ExcludedPrompt(i, 0, i, reason) for i, kind, reason in told if kind == "refused"]
        limit = ExclusionLimit(
            self.max_excluded,
            len(self.prompts),
            refused,
            location=lambda e: self.prompts[e.position].location or f"prompt {e.position}",
        )
        if (problem := limit.problem()) is not None:
            raise TooManyExcluded(f"{set_key(self.name)}: {problem}")
        return len(told)


class RunningSet:
    """One set of an evaluation that goes on: this rank's prompts of it."""

    def __init__(
        self, held_out: HeldOutSet, prompts: Sequence[Prompt], version: str | None
    ) -> None:
        self.held_out = held_out
        self.judged: dict[int, Judged] = {}  # by prompt
        self.ended_s = 0.0  # its last score
        self._prompts = {prompt.index: prompt for prompt in prompts}
        self._version = version
        self._groups: Groups | None = None

    @property
    def answered(self) -> tuple[int, int]:
        """Prompts that are scored, and all. From any thread."""
        groups = self._groups
        waiting = 0 if groups is None else groups.waiting
        return min(len(self.judged) + waiting, len(self._prompts)), len(self._prompts)

    def start(self, now_s: float) -> None:
        """Starts the generation of all prompts and returns at once."""
        self.ended_s = now_s
        self._generate(list(self._prompts))

    def generate_again(self, doubts: Sequence[tuple[str, int]]) -> None:
        """Those with a response that one of ``doubts`` is of: an endpoint, and since which proof
        what it has made is to be made anew."""
        self._generate(
            sorted(
                index
                for index, each in self.judged.items()
                if any(
                    url == endpoint and number >= proof
                    for url, number in each.made_by
                    for endpoint, proof in doubts
                )
            )
        )

    def interrupt(self, error: BaseException) -> None:
        """Whoever waits for the next group raises ``error``. From any thread."""
        if self._groups is not None:
            self._groups.interrupt(error)

    def receive(self) -> Iterator[RolloutGroup]:
        """Every group that is under way, once it is judged."""
        assert self._groups is not None, "not started"
        for group in self._groups:
            self.judged[group.prompt.index] = self.held_out.judge(group)
            self.ended_s = max(self.ended_s, group.completed_s)
            yield group

    def close(self) -> None:
        """Gives up what is not finished. Safe to call twice."""
        if self._groups is not None:
            self._groups.close()

    def _generate(self, indices: Sequence[int]) -> None:
        prompts = [self._prompts[index] for index in indices]
        self._groups = self.held_out.rollouts.produce(prompts, self._version)
