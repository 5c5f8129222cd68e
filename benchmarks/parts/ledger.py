"""What a run's own event logs say became of its prompts, held against what had to be drawn.

Every prompt before the cursor is in a closed batch exactly once: trained, skipped, rejected or
excluded, keyed by epoch and prompt index, by samples of the version of its batch; the positions of
each batch have no gap. *Trained* means: in a committed optimizer step. Where a run was resumed, a
batch counts as its last attempt closed it.
"""

from __future__ import annotations

from collections import defaultdict
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
    cursor: int  # prompts that closed batches have drawn
    groups_trained: int
    prompts_lost: int  # prompts that no closed batch has drawn
    prompts_trained_twice: int  # closings beyond the first of an epoch, whatever the outcome
    prompts_skipped: int  # their optimizer step was
    prompts_excluded: int  # given up as values, such as an over-long prompt; not lost
    prompts_rejected: int  # not wanted by the recipe; not lost
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
    the steps that they belong to, ``group_closed`` (epoch, index, position, outcome, stamped).
    """
    ranks = [_effective_batches(log) for log in logs]
    batches = [batch for rank in ranks for batch in rank.values()]
    outcomes: dict[Key, list[str]] = defaultdict(list)
    for batch in batches:
        for group in batch.groups:
            outcomes[_key(group)].append(group["outcome"])
    all_outcomes = [outcome for each in outcomes.values() for outcome in each]
    lost = sorted(expected - outcomes.keys())
    twice = {key: each for key, each in sorted(outcomes.items()) if len(each) > 1}
    skipped = sorted(key for key, each in outcomes.items() if "skipped" in each)
    unexpected = sorted(outcomes.keys() - expected)
    wrong = [problem for batch in batches for problem in batch.problems()]
    problems = [
        *(f"{_name(key)} was never drawn" for key in lost),
        *(f"{_name(key)} was {_times(each)}" for key, each in twice.items()),
        *(f"{_name(key)} is of a skipped step" for key in skipped),
        *(f"{_name(key)} is not in the dataset's order" for key in unexpected),
        *wrong,
        *_misplaced(ranks),
    ]
    return Ledger(
        batches=len({step for batch in batches for step in batch.steps}),
        cursor=len(all_outcomes),
        groups_trained=all_outcomes.count("trained"),
        prompts_lost=len(lost),
        prompts_trained_twice=sum(len(each) - 1 for each in twice.values()),
        prompts_skipped=len(skipped),
        prompts_excluded=all_outcomes.count("excluded"),
        prompts_rejected=all_outcomes.count("rejected"),
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
    groups: list[Event] = field(default_factory=list)

    def problems(self) -> list[str]:
        wrong = []
        if self.steps and self.version != self.dispatched:
            wrong.append(f"step {self.steps[0]} of {self.version} trained {self.dispatched}")
        for group in self.groups:
            stamped = group["stamped"]
            has_samples = bool(stamped) or group["outcome"] == "excluded"
            if not has_samples or not self.accepted.issuperset(stamped):
                name = _name(_key(group))
                wrong.append(f"{name}: samples of {stamped} in batch {self.dispatched}")
        return wrong


def _effective_batches(log: Iterable[Event]) -> dict[int, _Batch]:
    """By v, those in the final weights: what a later attempt trains again supersedes the former."""
    batches: dict[int, _Batch] = {}
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
        elif kind == "group_closed":
            batch.groups.append(event)
    return batches


def _misplaced(ranks: Sequence[Mapping[int, _Batch]]) -> Iterable[str]:
    """Positions of a batch that no rank has closed though there are later ones, or more than one.

    A batch that nobody has closed is told by its prompts.
    """
    for v in sorted({v for batches in ranks for v in batches}):
        groups = [group for batches in ranks if v in batches for group in batches[v].groups]
        positions = sorted(group["position"] for group in groups)
        if positions != list(range(len(positions))):
            yield f"batch {v} has groups at the positions {positions}"


def _key(group: Event) -> Key:
    return group["epoch"], group["index"]


def _name(key: Key) -> str:
    return f"prompt {key[1]} of epoch {key[0]}"


def _times(outcomes: Sequence[str]) -> str:
    """Of a prompt that is in more than one closed batch."""
    if len(set(outcomes)) == 1:
        return f"{outcomes[0]} {len(outcomes)} times"
    return " and ".join(outcomes)
