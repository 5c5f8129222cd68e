"""A run's folder read back: its closed batches, what they were trained on, what was measured."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from easyrl.dataloaders.producer.group_stream import GroupStream, ReadyGroup, packed_tokens
from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.history import History
from easyrl.ledger.certificate.records import BatchRecord
from easyrl.ledger.checkpoints.folder import CheckpointFolder
from easyrl.ledger.journal.codec import DrainRecord
from easyrl.ledger.journal.earlier_attempts import num_groups
from easyrl.ledger.journal.reading import batch_folder, journalled_batches, read_batch, read_drains
from easyrl.ledger.traces import CHECKPOINT_FOLDER, JOURNAL_FOLDER
from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.run_files import (
    CERTIFICATE_FILE,
    CONFIG_FILE,
    METRICS_FILE,
    attempt_config_file,
    file_of_run,
)
from easyrl.schema import (
    ExcludedPrompt,
    GroupOutcome,
    Key,
    PolicyVersion,
    RolloutGroup,
    ServedWeights,
)


class RecordedRun:
    """What a run has left: only batches that are in its weights count.

    Raises ``ValueError`` where the folder holds no run or its certificate is broken.
    """

    def __init__(self, folder: Path) -> None:
        for name in (CONFIG_FILE, CERTIFICATE_FILE, METRICS_FILE):
            file_of_run(folder, name)
        self.folder = folder
        self._journal = folder / JOURNAL_FOLDER
        self._history = History(folder / CERTIFICATE_FILE)
        try:
            self._history.take_all()
            if self._history.run is None:
                raise CertificateError("is empty", file=CERTIFICATE_FILE)
        except CertificateError as error:
            raise ValueError(f"{folder}: {error}; see easyrl verify {folder}") from error
        if self._history.run.source == "records":
            raise ValueError(
                f"{folder}: is a run on records, of which nothing is journalled that could be "
                "replayed; train its records again in another folder"
            )
        self.run = self._history.run  # what fixes the order of the prompts

    @property
    def num_batches(self) -> int:
        """Closed ones."""
        return len(self._history.batches)

    def batch_of_step(self, step: int) -> int:
        """The batch that optimizer step ``step`` belongs to. Raises ``ValueError``."""
        last_steps = [batch.last_step for batch in self._history.batches]
        if not last_steps:
            raise ValueError(f"{self.folder}: no batch of this run was closed")
        if not 1 <= step <= last_steps[-1]:
            raise ValueError(f"--step: the run has steps 1 to {last_steps[-1]}, {step} is not one")
        return bisect_left(last_steps, step)

    def batch(self, v: int) -> BatchRecord:
        """The account of batch ``v``."""
        return self._history.batch(v)

    def attempt_of(self, v: int) -> int:
        """The attempt that trained batch ``v``."""
        return PolicyVersion.parse(self.batch(v).version).attempt

    def config_file(self, attempt: int) -> Path:
        """The settings of attempt ``attempt``; those of the newest, if its own were not kept."""
        own = self.folder / attempt_config_file(attempt)
        return own if own.is_file() else self.folder / CONFIG_FILE

    def begun(self, attempt: int) -> tuple[int, int]:
        """Steps that were taken and prompts that were trained before ``attempt``, of which a batch
        is in the weights."""
        first = self._history.attempts[attempt].first_batch
        return self._first_step(first) - 1, self._history.batches[first].first_position

    def weights_before(self, v: int) -> str | None:
        """Digest of the weights that batch ``v`` was made by, and those behind the last batch; None
        if they were never published."""
        if v < len(self._history.batches):
            return self.batch(v).weights
        return None if self._history.end is None else self._history.end.weights

    def metrics_of(self, v: int) -> dict[str, Any]:
        """What was measured at the end of batch ``v``; a number that is not finite is None.

        Raises ``ValueError``.
        """
        step = self.batch(v).step
        if step not in self._metrics:
            raise ValueError(f"{self.folder / METRICS_FILE}: has no line of step {step}")
        return {name: value for name, value in self._metrics[step].items() if name != "step"}

    @cached_property
    def _metrics(self) -> dict[int, dict[str, float]]:
        """By step; the file is read once, however many batches are asked for."""
        return {int(line["step"]): line for line in read_metrics(self.folder / METRICS_FILE)}

    def require_journal(self, first: int, last: int) -> None:
        """Raises ``ValueError`` if a batch from ``first`` to ``last`` is no longer journalled."""
        for v in range(first, last + 1):
            if not self._is_journalled(v):
                behind = range(v + 1, self.num_batches)
                next_kept = next(filter(self._is_journalled, behind), None)
                there = (
                    "is empty"
                    if next_kept is None
                    else f"goes back to step {self._first_step(next_kept)}"
                )
                raise ValueError(
                    f"{self._journal}: batch {v}, which step {self.batch(last).step} builds on, "
                    f"was removed as nothing resumes from it; the journal {there}. Choose a later "
                    "step, or set journal.keep=all in the next run"
                )

    def _is_journalled(self, v: int) -> bool:
        return batch_folder(self._journal, v).is_dir()

    def replay_begins(self, v: int) -> int:
        """The batch that a replay of batch ``v`` begins with: behind the newest checkpoint."""
        before = self._history.batches[v - 1].last_step if v else 0
        steps = CheckpointFolder(self.folder / CHECKPOINT_FOLDER).steps()
        from_step = max((step for step in steps if step <= before), default=0)
        return bisect_right([batch.last_step for batch in self._history.batches], from_step)

    def replayable_steps(self) -> list[int]:
        """Optimizer steps whose batches are journalled from a checkpoint, or the start, on."""
        kept = set(journalled_batches(self._journal))
        return [
            step
            for v, batch in enumerate(self._history.batches)
            if kept.issuperset(range(self.replay_begins(v), v + 1))
            for step in range(self._first_step(v), batch.last_step + 1)
        ]

    def groups(self, v: int, keys: frozenset[Key]) -> dict[Key, RolloutGroup]:
        """The groups of ``keys`` that batch ``v`` was trained on, without their prompts' text.

        Raises ``ValueError`` where the journal is not what the certificate says.
        """
        trained = {g.key: g.digest for g in self.batch(v).groups if g.key in keys}
        found = {
            group.prompt.key: group
            for group in read_batch(self._journal, v)
            if trained.get(group.prompt.key) == group.digest
        }
        if missing := sorted(keys - found.keys()):
            epoch, index = missing[0]
            raise ValueError(
                f"{batch_folder(self._journal, v)}: has not the group of prompt {index} of epoch "
                f"{epoch} that was trained; see easyrl verify {self.folder}"
            )
        return found

    def drains(self, v: int, keys: frozenset[Key]) -> Sequence[DrainRecord]:
        """What of ``keys`` was drained from the queue at once in batch ``v``, in order.

        Nothing if no rank of the run drained just these, or it did not journal it. Raises
        ``JournalError``.
        """
        for drains in read_drains(self._journal, v, self.attempt_of(v)):
            own = [drain for drain in drains if keys.issuperset(drain.keys)]
            if num_groups(own) == len(keys):
                return own
        return ()

    def _first_step(self, v: int) -> int:
        return self._history.batches[v - 1].last_step + 1 if v else 1


@dataclass(frozen=True)
class RecordedBatch:
    """A batch as it was trained (``trainer.loop.OpenBatch``)."""

    updates: Sequence[GroupStream]
    refused: Sequence[GroupOutcome]
    accepted_versions: Sequence[str]
    discarded: Sequence[Key]
    membership: BatchRecord  # says what ended it
    withdrawn: str | None = None

    def close(self) -> None:
        pass


@dataclass
class RecordedRollouts:
    """``Rollouts`` that hand out journalled groups as they were trained; nothing is generated.

    On another number of ranks, or with another ``max_tokens``, in the order of their prompts.
    """

    run: RecordedRun
    last: int  # batch
    num_updates: int  # optimizer steps on each batch
    max_tokens: int  # packed, that the trainer will ask for at once
    ranks: Ranks
    in_prompt_order: set[int] = field(default_factory=set, init=False)  # batches handed out so
    _next: int = field(default=0, init=False)  # batch

    def has_more(self, position: int) -> bool:
        return self._next <= self.last

    def begin(
        self, served: ServedWeights, position: int, excluded: Sequence[ExcludedPrompt] = ()
    ) -> RecordedBatch:
        """This rank's groups of the batch, all of them ready."""
        v = served.version.v
        self._next = v + 1
        record, ranks = self.run.batch(v), self.ranks
        accepted = [group for group in record.groups if group.accepted]
        as_recorded = record.num_ranks == ranks.dp_size
        mine: list[list[Key]] = [[] for _ in range(self.num_updates)]
        for number, group in enumerate(accepted):
            rank = group.rank if as_recorded else number % ranks.dp_size
            if rank == ranks.dp_rank:
                update = number * self.num_updates // self.run.run.batch_size
                mine[update].append(group.key)
        groups = self.run.groups(v, frozenset(key for keys in mine for key in keys))
        refused = [g for g in record.groups
                   if not g.accepted and g.rank % ranks.dp_size == ranks.dp_rank]  # fmt: skip
        updates = [self._stream(record, keys, groups) for keys in mine]
        return RecordedBatch(updates, refused, record.accepted_versions, record.discarded, record)

    def sync(self) -> None:
        pass

    def share_withdrawals(self) -> None:
        pass

    def withdraw_endpoints(self, problems: Mapping[str, str]) -> None:
        pass

    def _stream(
        self, record: BatchRecord, keys: Sequence[Key], groups: Mapping[Key, RolloutGroup]
    ) -> GroupStream:
        drains = self.run.drains(record.batch, frozenset(keys))
        if any(drain.max_tokens != self.max_tokens for drain in drains):
            drains = ()  # another budget is to be tried
        if keys and not drains:
            self.in_prompt_order.add(record.batch)
        stream = GroupStream(cancel=lambda: None, in_prompt_order=True)
        stream.accepted_versions = frozenset(record.accepted_versions)
        stream.past_drains.extend(drains)
        ahead = {key for drain in drains for piece in drain.ahead for key, _ in piece}
        elsewhere = {g.key for g in record.groups if g.digest is not None} & ahead - set(keys)
        stream.elsewhere = self.run.groups(record.batch, frozenset(elsewhere))
        for key in keys:
            stream.put(ReadyGroup(key, packed_tokens(groups[key]), groups[key]))
        stream.end()
        return stream
