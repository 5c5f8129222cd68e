"""``easyrl verify RUN_DIR``: reads certificate and journal back and says whether all is on-policy.

Nothing is taken from the trainer's word that can be found out otherwise: the prompts of each batch
follow from seed and dataset size, the versions on the tokens from the journalled groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from easyrl.ledger.certificate.chain import ChainReader, Line, read_record
from easyrl.ledger.certificate.dataset_order import DatasetOrder
from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.evidence import AcceptOf, JournalEvidence
from easyrl.ledger.certificate.history import History
from easyrl.ledger.certificate.records import BatchRecord
from easyrl.ledger.certificate.traces import REMOVED, Traces
from easyrl.metrics.trackers import read_metrics

CERTIFICATE_FILE, METRICS_FILE, JOURNAL_FOLDER = "certificate.jsonl", "metrics.jsonl", "journal"


@dataclass
class Verdict:
    """What was found; the counts go as far as the checks came."""

    violation: CertificateError | None = None
    batches: int = 0  # in the weights
    trained: int = 0  # groups
    skipped: int = 0  # groups of skipped updates
    excluded: int = 0  # groups without usable responses
    rejected: int = 0  # groups that the recipe did not want
    decisions: int = 0  # whose outcome was found again from the journal
    attempts: int = 0
    superseded: int = 0  # lines of batches that a later attempt trained again
    recovered: int = 0  # groups from the journal of an earlier attempt
    unconfirmed: int = 0  # of them, those whose endpoints' confirmations died with that attempt
    discarded: int = 0  # groups journalled for other weights, generated again
    unproved: int = 0  # batches with an endpoint whose weights were not read back
    unjournalled: int = 0  # groups without a record to compare with
    pruned: int = 0  # batches that the journal has removed, as it may
    torn: bool = False  # the last line was cut off
    ended: bool = False

    @property
    def on_policy(self) -> bool:
        return self.violation is None

    def __str__(self) -> str:
        if self.violation is not None:
            return f"NOT on-policy: {self.violation}"
        facts = [
            f"{_number(self.batches, 'batch', 'batches')}, {_number(self.trained, 'group')} trained"
        ]
        told = [
            (self.skipped, "of skipped updates"),
            (self.excluded, "excluded"),
            (self.rejected, "rejected"),
            (self.recovered, "recovered from the journal"),
            (self.discarded, "discarded and generated again"),
            (self.unjournalled, "not journalled"),
        ]
        facts += [f"{count} {what}" for count, what in told if count]
        if self.unconfirmed:
            facts.append(
                f"{_number(self.unconfirmed, 'group')} of attempts that died before their "
                "endpoints' confirmations were certified"
            )
        if self.decisions:
            facts.append(f"{_number(self.decisions, 'decision')} replayed")
        if self.attempts > 1:
            lines = _number(self.superseded, "line")
            facts.append(f"{self.attempts} attempts, {lines} superseded")
        if self.unproved:
            facts.append(f"{_number(self.unproved, 'batch', 'batches')} without proof of bits")
        if self.pruned:
            facts.append(f"journal pruned of {_number(self.pruned, 'batch', 'batches')}")
        if self.torn:
            facts.append("a line cut off at the end")
        facts.append("complete" if self.ended else "not complete")
        return "on-policy: " + ", ".join(facts)


def verify(run_dir: Path, accept_of: AcceptOf = lambda attempt: None) -> Verdict:
    """Checks the whole run, which may be going on.

    ``accept_of``: by attempt, what its recipe decides of a group; None where that is not known: the
    rule of membership is checked then, not the recipe's decisions.
    Raises ``ValueError`` or ``OSError`` if there is none to check.
    """
    path = run_dir / CERTIFICATE_FILE
    if not path.is_file():
        raise ValueError(f"{run_dir}: has no {CERTIFICATE_FILE}; name a run's run.output_dir")
    verdict = Verdict()
    try:
        with path.open("rb") as file:
            _verify(run_dir, file, verdict, accept_of)
    except CertificateError as error:
        verdict.violation = error
    return verdict


def _verify(run_dir: Path, file: BinaryIO, verdict: Verdict, accept_of: AcceptOf) -> None:
    # Before the certificate: a run that goes on meanwhile only ever adds to it.
    last_step = _last_step(run_dir / METRICS_FILE)
    traces = Traces.read(run_dir, run_dir / JOURNAL_FOLDER)
    history = History(lambda line: _batch(file, line))
    chain = ChainReader(run_dir / CERTIFICATE_FILE)
    history.take_all(chain)
    verdict.torn, verdict.ended = chain.torn > 0, history.ended
    verdict.attempts, verdict.superseded = history.num_attempts, history.num_superseded
    _nothing_cut_off(last_step, history)
    traces.examine(history)
    order = DatasetOrder(history.run)
    evidence = JournalEvidence(run_dir, run_dir / JOURNAL_FOLDER, accept_of)
    for batch in history.batches:
        record = _batch(file, batch.line)
        try:
            order.examine(record, batch)
            evidence.examine(record)
        except CertificateError as error:
            raise error.at_line(batch.line.number) from None
        _count(record, verdict)
        verdict.unconfirmed += batch.num_unconfirmed
    verdict.decisions = evidence.num_replayed
    verdict.pruned, verdict.unjournalled = evidence.num_pruned, evidence.num_unjournalled


def _count(record: BatchRecord, verdict: Verdict) -> None:
    outcomes = [group.outcome for group in record.groups]
    verdict.batches += 1
    verdict.trained += outcomes.count("trained")
    verdict.skipped += outcomes.count("skipped")
    verdict.excluded += outcomes.count("excluded")
    verdict.rejected += outcomes.count("rejected")
    verdict.recovered += sum(group.recovered for group in record.groups)
    verdict.discarded += len(record.discarded)
    verdict.unproved += not all(c.bits_proved for c in record.confirmations)


def _last_step(metrics: Path) -> int:
    """The last that was reported; 0 if none was."""
    steps = [int(line["step"]) for line in read_metrics(metrics)] if metrics.exists() else []
    return max(steps, default=0)


def _nothing_cut_off(last_step: int, history: History) -> None:
    """A step's metrics are written after its line: metrics of a later step betray removed lines."""
    if last_step > history.last_step:
        raise CertificateError(
            f"has step {last_step}, the certificate ends with step {history.last_step}: {REMOVED}",
            file=METRICS_FILE,
        )


def _batch(file: BinaryIO, line: Line) -> BatchRecord:
    record = read_record(file, line)
    assert isinstance(record, BatchRecord)
    return record


def _number(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
