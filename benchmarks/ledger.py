"""What a run's own event logs say was trained, held against what had to be trained.

*Trained* means: in a committed optimizer step, keyed by epoch and prompt index. Every prompt has to
be trained exactly once in each epoch, by samples of the version of its batch. Where a run was
resumed, a batch counts as its last attempt trained it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from easyrl.metrics.event_log import read_events
from easyrl.schema import PolicyVersion

Event = Mapping[str, Any]
Key = tuple[int, int]  # epoch, prompt index


@dataclass(frozen=True)
class Ledger:
    """The account of one run; ``problems`` names the first few entries that are wrong."""

    batches: int  # closed by a committed step
    groups_trained: int
    prompts_lost: int  # prompts that no committed step trained
    prompts_trained_twice: int  # trainings beyond the first of an epoch
    prompts_excluded: int  # given up as values, such as an over-long prompt; not lost
    prompts_unexpected: int  # not in the dataset's order
    wrong_version_trained: int  # groups with a sample of another version than their batch's
    problems: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        return not self.problems


def dataset_order(num_prompts: int, epochs: int, num_groups: int | None = None) -> set[Key]:
    """Keys of all prompts of all epochs; ``num_groups``: of an unshuffled run that ends early."""
    keys = [(epoch, index) for epoch in range(epochs) for index in range(num_prompts)]
    return set(keys if num_groups is None else keys[:num_groups])


def read_ledger(run_dir: Path, expected: set[Key]) -> Ledger:
    """The account of the run in ``run_dir``, all ranks together."""
    logs = [read_events(path) for path in sorted(run_dir.glob("events-rank*.jsonl"))]
    return keep_ledger(logs, expected)


def keep_ledger(logs: Sequence[Iterable[Event]], expected: set[Key]) -> Ledger:
    """The account of ``logs``, one per rank, each in the order in which it was written.

    Reads ``batch_dispatched`` (version), ``step`` (step, version, accepted, skipped) and, behind
    the step that they belong to, ``group_trained`` and ``group_excluded`` (epoch, index, stamped).
    """
    trained: Counter[Key] = Counter()
    excluded: set[Key] = set()
    wrong: list[str] = []
    committed: set[int] = set()
    for batch in itertools.chain.from_iterable(map(_effective_batches, logs)):
        trained.update(key for key, _ in batch.trained)
        excluded.update(batch.excluded)
        committed.update(batch.steps)
        wrong += batch.problems()
    lost = sorted(expected - trained.keys() - excluded)
    twice = {key: count - 1 for key, count in sorted(trained.items()) if count > 1}
    unexpected = sorted(trained.keys() - expected)
    problems = [
        *(f"{_name(key)} was never trained" for key in lost),
        *(f"{_name(key)} was trained {extra + 1} times" for key, extra in twice.items()),
        *(f"{_name(key)} is not in the dataset's order" for key in unexpected),
        *wrong,
    ]
    return Ledger(
        batches=len(committed),
        groups_trained=trained.total(),
        prompts_lost=len(lost),
        prompts_trained_twice=sum(twice.values()),
        prompts_excluded=len(excluded),
        prompts_unexpected=len(unexpected),
        wrong_version_trained=len(wrong),
        problems=tuple(problems),
    )


@dataclass
class _Batch:
    """What one rank says of a closed batch."""

    dispatched: str  # version that its groups were asked of
    version: str  # version that its steps trained
    accepted: set[str]  # names of its weights: an earlier attempt's groups have that one's
    steps: list[int] = field(default_factory=list)  # committed ones
    trained: list[tuple[Key, list[str]]] = field(default_factory=list)  # with what is stamped
    excluded: list[Key] = field(default_factory=list)

    def problems(self) -> list[str]:
        wrong = []
        if self.steps and self.version != self.dispatched:
            wrong.append(f"step {self.steps[0]} of {self.version} trained {self.dispatched}")
        for key, stamped in self.trained:
            if not stamped or not self.accepted.issuperset(stamped):
                wrong.append(f"{_name(key)}: samples of {stamped} in batch {self.dispatched}")
        return wrong


def _effective_batches(log: Iterable[Event]) -> Iterable[_Batch]:
    """Those in the final weights: what a later attempt trains again supersedes the former."""
    batches: dict[int, _Batch] = {}  # by v
    dispatched = ""
    batch = _Batch("", "", set())  # the one that was closed last
    for event in log:
        kind = event["event"]
        if kind == "batch_dispatched":
            dispatched = event["version"]
        elif kind == "step":
            if event["version"] != batch.version:  # else a further update of the same batch
                batch = _Batch(dispatched, event["version"], set())
                batches[PolicyVersion.parse(event["version"]).v] = batch
            batch.accepted.update(event["accepted"])
            if not event["skipped"]:
                batch.steps.append(event["step"])
        elif kind == "group_trained":
            batch.trained.append(((event["epoch"], event["index"]), event["stamped"]))
        elif kind == "group_excluded":
            batch.excluded.append((event["epoch"], event["index"]))
    return batches.values()


def _name(key: Key) -> str:
    return f"prompt {key[1]} of epoch {key[0]}"
