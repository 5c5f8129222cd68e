"""Evaluation on held-out prompts: pass@k and avg@k."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import comb, fsum
from typing import NamedTuple, Protocol

from easyrl.config import EvaluationConfig
from easyrl.ledger.exclusions import ExclusionLimit
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.schedule import Due
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import (
    ExcludedPrompt,
    Exclusion,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    TooManyExcluded,
)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of P(one of k samples is correct) (Chen et al. 2021, eq. 1)."""
    assert 1 <= k <= num_samples and 0 <= num_correct <= num_samples
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


class ScheduledEvaluation:
    """Evaluates every so many steps, and at start and end where that is wanted. Collective."""

    def __init__(self, evaluator: Evaluator, step: int) -> None:
        self._evaluator = evaluator
        self._due = Due(evaluator.config.every_steps, step)
        self._running: RunningEvaluation | None = None

    def begin(
        self, step: int, version: PolicyVersion, *, is_last: bool, again: bool = False
    ) -> RunningEvaluation | None:
        """Starts one of the endpoints' present weights if it is due, or ``again``."""
        config = self._evaluator.config
        wanted = self._due.passes(step) or again
        wanted |= (step == 0 and config.at_start) or (is_last and config.at_end)
        self._running = self._evaluator.prepare(str(version)) if wanted else None
        if self._running is not None:
            self._running.start()  # from here on endpoints may be doubted
        return self._running

    @property
    def answered(self) -> tuple[int, int] | None:
        """This rank's prompts that are scored of the one that goes on, and all. From any thread."""
        return None if self._running is None else self._running.answered

    def withdraw(self, endpoint: str, proof: int) -> None:
        """As ``RunningEvaluation.withdraw``, of the one that was begun last. From any thread."""
        if self._running is not None:
            self._running.withdraw(endpoint, proof)


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
    # told of each of this rank's groups; of one that is generated again, again
    on_group: Callable[[RolloutGroup], object] = lambda group: None

    def evaluate(self, version: str | None) -> dict[str, float]:
        """``eval/*``, by what the endpoints serve. Collective."""
        with closing(self.prepare(version)) as running:
            running.start()
            return running.finish()

    def prepare(self, version: str | None) -> RunningEvaluation:
        """An evaluation of this rank's prompts that is not started yet."""
        ranks = self.collectives.ranks
        return RunningEvaluation(self, self.prompts[ranks.dp_rank :: ranks.dp_size], version)

    def judge(self, group: RolloutGroup) -> Judged:
        """What counts of a finished group."""
        said = [score.components.get(self.reward_name) for score in group.scores]
        return Judged(
            sum(score is not None and score >= self.config.threshold for score in said),
            group.excluded,
            tuple(made for completion in group.completions for made in completion.made_by),
        )

    def metrics(self, judged: Mapping[int, Judged], seconds: float) -> dict[str, float]:
        """Of this rank's ``judged`` groups by prompt, all ranks. Collective.

        ``time/evaluation_s`` is the longest of the ranks' ``seconds``.
        """
        correct = [each.num_correct for each in judged.values()]
        excluded = [(i, *each.excluded) for i, each in judged.items() if each.excluded is not None]
        told = self.collectives.all_gather([seconds, correct])
        everyone = [c for _, of_rank in told for c in of_rank]
        num_excluded = self._check_excluded(excluded)
        num_prompts = len(everyone)
        num_samples = self.config.num_samples
        accuracy = sum(everyone) / (num_prompts * num_samples)
        metrics = {"eval/accuracy": accuracy, f"eval/avg@{num_samples}": accuracy}
        metrics["eval/excluded"] = float(num_excluded)
        for k in self.config.pass_at:
            total = fsum(pass_at_k(num_samples, c, k) for c in everyone)  # in any order
            metrics[f"eval/pass@{k}"] = total / num_prompts
        metrics["time/evaluation_s"] = max(seconds for seconds, _ in told)
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


class Judged(NamedTuple):
    """What counts of a finished group."""

    num_correct: int
    excluded: Exclusion | None
    made_by: tuple[
        tuple[str, int], ...
    ]  # of each response, or turn: endpoint and number of its proof


class RunningEvaluation:
    """An evaluation whose prompts are answered in the background, of one version."""

    def __init__(
        self, evaluator: Evaluator, prompts: Sequence[Prompt], version: str | None
    ) -> None:
        self._evaluator = evaluator
        self._prompts = {prompt.index: prompt for prompt in prompts}
        self._version = version
        self._withdrawn = queue.SimpleQueue[tuple[str, int]]()  # endpoints and good proofs
        self._judged: dict[int, Judged] = {}  # by prompt
        self._groups: Groups | None = None
        self._is_open = True
        self._started_s = self._ended_s = 0.0  # its first request, its last score

    @property
    def answered(self) -> tuple[int, int] | None:
        """Prompts that are scored, and all; None once it is closed. From any thread."""
        groups = self._groups
        if groups is None or not self._is_open:
            return None
        return min(len(self._judged) + groups.waiting, len(self._prompts)), len(self._prompts)

    def start(self) -> None:
        """Starts the generation of all prompts and returns at once."""
        self._started_s = self._ended_s = time.monotonic()
        self._generate(list(self._prompts.values()))

    def withdraw(self, endpoint: str, proof: int) -> None:
        """What ``endpoint`` has made since its proof number ``proof`` is generated again.

        From any thread.
        """
        self._withdrawn.put((endpoint, proof))

    def finish(self) -> dict[str, float]:
        """``eval/avg@k`` (also ``eval/accuracy``) and ``eval/pass@k``, all ranks. Collective.

        ``time/evaluation_s``: from its first request until its last response was scored, whatever
        else went on meanwhile.
        A prompt that nobody can answer counts as not solved, and in ``eval/excluded``. What any
        rank was told to withdraw is generated again before; called once more, what was since.
        Raises on all ranks what keeps one of them from going on: an outage, ``StopRequested``; and
        ``TooManyExcluded``.
        """
        while True:
            self._evaluator.collectives.end_together(self._receive())
            doubts = self._share_doubts()
            if not doubts:
                return self._evaluator.metrics(self._judged, self._ended_s - self._started_s)
            self._generate([self._prompts[index] for index in self._in_doubt(doubts)])

    def close(self) -> None:
        """Gives up what is not finished. Safe to call twice."""
        self._is_open = False
        if self._groups is not None:
            self._groups.close()

    def _generate(self, prompts: Sequence[Prompt]) -> None:
        self._groups = self._evaluator.rollouts.produce(prompts, self._version)

    def _receive(self) -> Exception | None:
        """Judges every group that is under way; what interrupts that."""
        assert self._groups is not None, "not started"
        try:
            with self._evaluator.stop.wakes(self._groups.interrupt):
                for group in self._groups:
                    self._judged[group.prompt.index] = self._evaluator.judge(group)
                    self._ended_s = max(self._ended_s, group.completed_s)
                    self._evaluator.on_group(group)
        except Exception as error:
            self.close()
            if not self._evaluator.is_interruption(error):
                raise
            return error
        return None

    def _share_doubts(self) -> list[tuple[str, int]]:
        """Endpoint and good proof of what any rank was told to withdraw. Collective.

        Another rank's numbers of proofs are its own: here all that the endpoint made is in doubt.
        """
        mine: list[tuple[str, int]] = []
        while not self._withdrawn.empty():
            mine.append(self._withdrawn.get())
        collectives = self._evaluator.collectives
        return [
            (endpoint, proof if rank == collectives.ranks.dp_rank else 0)
            for rank, told in enumerate(collectives.all_gather(mine))
            for endpoint, proof in told
        ]

    def _in_doubt(self, doubts: Sequence[tuple[str, int]]) -> list[int]:
        """Prompts with a response that one of ``doubts`` is of."""
        return sorted(
            index
            for index, each in self._judged.items()
            if any(
                url == endpoint and number >= proof
                for url, number in each.made_by
                for endpoint, proof in doubts
            )
        )
