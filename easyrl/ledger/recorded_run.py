"""A run's folder read back: its closed batches, what they were trained on, what was measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from easyrl.dataloaders.producer.group_stream import GroupStream, Idle, ReadyGroup, packed_tokens
from easyrl.ledger.certificate.chain import ChainReader, Line, read_record
from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.history import History
from easyrl.ledger.certificate.records import AttemptRecord, BatchRecord, EndRecord, RunRecord
from easyrl.ledger.journal import read_batch
from easyrl.ledger.journal.codec import DrainRecord
from easyrl.ledger.journal.earlier_attempts import num_groups
from easyrl.ledger.journal.reading import batch_folder, read_drains
from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.run_files import (
    CERTIFICATE_FILE,
    CONFIG_FILE,
    METRICS_FILE,
    attempt_config_file,
)
from easyrl.schema import (
    EndedBy,
    FinishedSamples,
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
            if not (folder / name).is_file():
                raise ValueError(f"{folder}: has no {name}; name the run.output_dir of a run")
        self.folder = folder
        self._final_weights: str | None = None
        self._begun: dict[int, tuple[int, int]] = {}  # attempt → steps and prompts before it
        self._history = History(self._read)
        try:
            self._take_all()
        except CertificateError as error:
            raise ValueError(f"{folder}: {error}; see easyrl verify {folder}") from error

    @property
    def run(self) -> RunRecord:
        """What fixes the order of the prompts."""
        assert self._history.run is not None
        return self._history.run

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
        return self._read(self._history.batches[v].line)

    def attempt_of(self, v: int) -> int:
        """The attempt that trained batch ``v``."""
        return PolicyVersion.parse(self.batch(v).version).attempt

    def config_file(self, attempt: int) -> Path:
        """The settings of attempt ``attempt``; those of the newest, if its own were not kept."""
        own = self.folder / attempt_config_file(attempt)
        return own if own.is_file() else self.folder / CONFIG_FILE

    def begun(self, attempt: int) -> tuple[int, int]:
        """Steps that were taken and prompts that were trained before attempt ``attempt``."""
        return self._begun[attempt]

    def weights_after(self, v: int) -> str | None:
        """Digest of the weights that batch ``v`` came to, if they were ever published."""
        if v + 1 < len(self._history.batches):
            return self.batch(v + 1).weights
        return self._final_weights

    def metrics_of(self, v: int) -> dict[str, Any]:
        """What was measured at the end of batch ``v``; a number that is not finite is None.

        Raises ``ValueError``.
        """
        step = self.batch(v).step
        lines = [m for m in read_metrics(self.folder / METRICS_FILE) if m["step"] == step]
        if not lines:
            raise ValueError(f"{self.folder / METRICS_FILE}: has no line of step {step}")
        return {name: value for name, value in lines[-1].items() if name != "step"}

    def require_journal(self, first: int, last: int) -> None:
        """Raises ``ValueError`` if a batch from ``first`` to ``last`` is no longer journalled."""
        journal = self.folder / "journal"
        for v in range(first, last + 1):
            if not batch_folder(journal, v).is_dir():
                kept = [u for u in range(v, len(self._history.batches))
                        if batch_folder(journal, u).is_dir()]  # fmt: skip
                there = f"goes back to step {self._first_step(kept[0])}" if kept else "is empty"
                raise ValueError(
                    f"{journal}: batch {v}, which step {self.batch(last).step} builds on, was "
                    f"removed as nothing resumes from it; the journal {there}. Choose a later "
                    "step, or set journal.keep=all in the next run"
                )

    def groups(self, v: int, keys: frozenset[Key]) -> dict[Key, RolloutGroup]:
        """The groups of ``keys`` that batch ``v`` was trained on, without their prompts' text.

        Raises ``ValueError`` where the journal is not what the certificate says.
        """
        trained = {g.key: g.digest for g in self.batch(v).groups if g.key in keys}
        found = {
            each.key: each.group
            for each in read_batch(self.folder / "journal", v)
            if trained.get(each.key) == each.digest
        }
        if missing := sorted(keys - found.keys()):
            epoch, index = missing[0]
            raise ValueError(
                f"{batch_folder(self.folder / 'journal', v)}: has not the group of prompt {index} "
                f"of epoch {epoch} that was trained; see easyrl verify {self.folder}"
            )
        return found

    def drains(self, v: int, keys: frozenset[Key]) -> Sequence[DrainRecord]:
        """What of ``keys`` was drained from the queue at once in batch ``v``, in order.

        Nothing if no rank of the run drained just these, or it did not journal it. Raises
        ``JournalError``.
        """
        ranks = read_drains(self.folder / "journal", v, self.attempt_of(v))
        for drains in ranks:
            own = [drain for drain in drains if keys.issuperset(drain.keys)]
            if num_groups(own) == len(keys):
                return own
        return ()

    def _first_step(self, v: int) -> int:
        return self._history.batches[v - 1].last_step + 1 if v else 1

    def _take_all(self) -> None:
        for line, record in ChainReader(self.folder / CERTIFICATE_FILE):
            try:
                self._history.take(line, record)
            except CertificateError as error:
                raise error.at_line(line.number) from None
            if isinstance(record, AttemptRecord):
                step = self._history.batches[-1].last_step if self._history.batches else 0
                self._begun[record.attempt] = step, self._history.num_drawn
            self._final_weights = record.weights if isinstance(record, EndRecord) else None
        if self._history.run is None:
            raise CertificateError("is empty", file=CERTIFICATE_FILE)

    def _read(self, line: Line) -> BatchRecord:
        with (self.folder / CERTIFICATE_FILE).open("rb") as file:
            record = read_record(file, line)
        assert isinstance(record, BatchRecord)
        return record


class RecordedRollouts:
    """``Rollouts`` that hand out journalled groups as they were trained; nothing is generated.

    On another number of ranks, or with another ``max_tokens``, in the order of their prompts.

    Args:
        last: the last batch.
        num_updates: optimizer steps on each batch.
    Attributes:
        in_prompt_order: batches that were handed out so.
    """

    def __init__(self, run: RecordedRun, last: int, num_updates: int, ranks: Ranks) -> None:
        self._run = run
        self._last = last
        self._num_updates = num_updates
        self._ranks = ranks
        self._next = 0  # batch
        self.in_prompt_order: set[int] = set()

    def has_more(self, position: int) -> bool:
        return self._next <= self._last

    def begin(self, served: ServedWeights, position: int) -> RecordedBatch:
        """This rank's groups of the batch, all of them ready."""
        v = served.version.v
        self._next = v + 1
        record, ranks = self._run.batch(v), self._ranks
        accepted = [group for group in record.groups if group.accepted]
        as_recorded = record.num_ranks == ranks.dp_size
        mine: list[list[Key]] = [[] for _ in range(self._num_updates)]
        for number, group in enumerate(accepted):
            rank = group.rank if as_recorded else number % ranks.dp_size
            if rank == ranks.dp_rank:
                update = number * self._num_updates // self._run.run.batch_size
                mine[update].append(group.key)
        groups = self._run.groups(v, frozenset(key for keys in mine for key in keys))
        refused = [
            group
            for group in record.groups
            if not group.accepted and group.rank % ranks.dp_size == ranks.dp_rank
        ]
        updates = [self._stream(v, keys, groups) for keys in mine]
        return RecordedBatch(updates, record, refused)

    def sync(self) -> None:
        pass

    def share_withdrawals(self) -> None:
        pass

    def _stream(
        self, v: int, keys: Sequence[Key], groups: Mapping[Key, RolloutGroup]
    ) -> GroupStream:
        drains = self._run.drains(v, frozenset(keys))
        if keys and not drains:
            self.in_prompt_order.add(v)
        stream = _RecordedStream(forget=lambda: self.in_prompt_order.add(v))
        stream.accepted_versions = frozenset(self._run.batch(v).accepted_versions)
        stream.past_drains.extend(drains)
        for key in keys:
            stream.put(ReadyGroup(key, packed_tokens(groups[key]), groups[key]))
        stream.end()
        return stream


class Ended(NamedTuple):
    """The membership of a batch that is over."""

    ended_by: EndedBy


class RecordedBatch:
    """A batch as it was trained (``trainer.loop.OpenBatch``)."""

    def __init__(
        self,
        updates: Sequence[GroupStream],
        record: BatchRecord,
        refused: Sequence[GroupOutcome],
    ) -> None:
        self.updates = updates
        self.accepted_versions = record.accepted_versions
        self.discarded = record.discarded
        self.refused = refused
        self.membership = Ended(record.ended_by)
        self.withdrawn: str | None = None

    def close(self) -> None:
        pass


class _RecordedStream(GroupStream):
    """Repeats what was trained together unless another ``max_tokens`` is to be tried.

    Args:
        forget: is told that another is.
    """

    def __init__(self, forget: Callable[[], object]) -> None:
        super().__init__(cancel=lambda: None, in_prompt_order=True)
        self._forget = forget

    def drain_ready(self, max_tokens: int, idle: Idle | None = None) -> list[RolloutGroup]:
        self._forget_others(max_tokens)
        return super().drain_ready(max_tokens, idle)

    def ahead_of_drain(self, max_tokens: int) -> Iterator[list[FinishedSamples]]:
        self._forget_others(max_tokens)
        return super().ahead_of_drain(max_tokens)

    def _forget_others(self, max_tokens: int) -> None:
        if any(drain.max_tokens != max_tokens for drain in self.past_drains):
            self.past_drains.clear()
            self._forget()
