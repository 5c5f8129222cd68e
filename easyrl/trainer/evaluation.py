"""Evaluation on sets of held-out prompts: when it is due, and beside its version's batch."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from easyrl.config import EvaluationConfig
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.schedule import Due
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import PolicyVersion, RolloutGroup
from easyrl.trainer.held_out_set import HeldOutSet, RunningSet


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


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Samples every prompt of every set several times and counts the correct responses."""

    config: EvaluationConfig
    sets: Sequence[HeldOutSet]
    is_interruption: Callable[[Exception], bool]  # nothing is wrong: an outage, a stop
    collectives: Collectives
    stop: StopRequest
    # told the set's name and each of this rank's groups; of one that is generated again, again
    on_group: Callable[[str, RolloutGroup], object] = lambda name, group: None
    known: Callable[[], Mapping[str, float]] = dict  # what else there is to say of one. Collective

    def evaluate(self, version: str | None) -> dict[str, float]:
        """``eval/*``, by what the endpoints serve. Collective."""
        with closing(self.prepare(version)) as running:
            running.start()
            return running.finish()

    def prepare(self, version: str | None) -> RunningEvaluation:
        """An evaluation of this rank's prompts that is not started yet."""
        ranks = self.collectives.ranks
        own = slice(ranks.dp_rank, None, ranks.dp_size)
        return RunningEvaluation(self, [RunningSet(s, s.prompts[own], version) for s in self.sets])


class RunningEvaluation:
    """An evaluation whose prompts are answered in the background, of one version.

    The prompts of all its sets are asked for at once, set by set.
    """

    def __init__(self, evaluator: Evaluator, sets: Sequence[RunningSet]) -> None:
        self._evaluator = evaluator
        self._sets = sets
        self._withdrawn = queue.SimpleQueue[tuple[str, int]]()  # endpoints and good proofs
        self._is_open = False
        self._started_s = 0.0  # its first request

    @property
    def answered(self) -> tuple[int, int] | None:
        """Prompts that are scored, and all; None once it is closed. From any thread."""
        if not self._is_open:
            return None
        scored, of_all = zip(*(each.answered for each in self._sets), strict=True)
        return sum(scored), sum(of_all)

    def start(self) -> None:
        """Starts the generation of all prompts and returns at once."""
        self._started_s = time.monotonic()
        self._is_open = True
        for each in self._sets:
            each.start(self._started_s)

    def withdraw(self, endpoint: str, proof: int) -> None:
        """What ``endpoint`` has made since its proof number ``proof`` is generated again.

        From any thread.
        """
        self._withdrawn.put((endpoint, proof))

    def finish(self) -> dict[str, float]:
        """``eval/avg@k`` (also ``eval/accuracy``) and ``eval/pass@k``, all ranks. Collective.

        Of a set with a name they are ``eval/NAME/…``. ``time/evaluation_s``: from its first request
        until its last response was scored on any rank, whatever else went on meanwhile.
        A prompt that nobody can answer counts as not solved, and in ``eval/excluded``. What any
        rank was told to withdraw is generated again before; called once more, what was since.
        Raises on all ranks what keeps one of them from going on: an outage, ``StopRequested``; and
        ``TooManyExcluded``.
        """
        collectives = self._evaluator.collectives
        while True:
            collectives.end_together(self._receive())
            doubts = self._share_doubts()
            if not doubts:
                break
            for each in self._sets:
                each.generate_again(doubts)
        figures: dict[str, float] = {}
        for each in self._sets:
            figures |= each.held_out.metrics(each.judged, collectives)
        figures |= self._evaluator.known()
        seconds = max(each.ended_s for each in self._sets) - self._started_s
        return figures | {"time/evaluation_s": max(collectives.all_gather(seconds))}

    def close(self) -> None:
        """Gives up what is not finished. Safe to call twice."""
        self._is_open = False
        for each in self._sets:
            each.close()

    def _receive(self) -> Exception | None:
        """Judges every group that is under way; what interrupts that."""
        try:
            for each in self._sets:
                with self._evaluator.stop.wakes(each.interrupt):
                    for group in each.receive():
                        self._evaluator.on_group(each.held_out.name, group)
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
