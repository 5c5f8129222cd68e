"""``easyrl verify RUN_DIR``: reads certificate and journal back and says whether all is on-policy.

Nothing is taken from the trainer's word that can be found out otherwise: the prompts of each batch
follow from seed and dataset size, the versions on the tokens from the journalled groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.ledger.certificate.errors import CertificateError, located
from easyrl.ledger.certificate.history import History
from easyrl.ledger.certificate.records import BatchRecord, RunRecord
from easyrl.ledger.evidence import AcceptOf, JournalEvidence
from easyrl.ledger.traces import Traces
from easyrl.runtime.run_files import CERTIFICATE_FILE
from easyrl.schema import GroupOutcome, PolicyVersion, Prompt


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
    unjudged: int = 0  # batches whose log-probabilities were held to no limit
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
        batches, groups = _number(self.batches, "batch", "batches"), _number(self.trained, "group")
        superseded = _number(self.superseded, "line")
        told = [
            (True, f"{batches}, {groups} trained"),
            (self.skipped, f"{self.skipped} of skipped updates"),
            (self.excluded, f"{self.excluded} excluded"),
            (self.rejected, f"{self.rejected} rejected"),
            (self.recovered, f"{self.recovered} recovered from the journal"),
            (self.discarded, f"{self.discarded} discarded and generated again"),
            (self.unjournalled, f"{self.unjournalled} not journalled"),
            (
                self.unconfirmed,
                f"{_number(self.unconfirmed, 'group')} of attempts that died before their "
                "endpoints' confirmations were certified",
            ),
            (self.decisions, f"{_number(self.decisions, 'decision')} replayed"),
            (self.attempts > 1, f"{self.attempts} attempts, {superseded} superseded"),
            (self.unproved, f"{_number(self.unproved, 'batch', 'batches')} without proof of bits"),
            (
                self.unjudged,
                f"{_number(self.unjudged, 'batch', 'batches')} with log-probabilities not judged",
            ),
            (self.pruned, f"journal pruned of {_number(self.pruned, 'batch', 'batches')}"),
            (self.torn, "a line cut off at the end"),
            (True, "complete" if self.ended else "not complete"),
        ]
        return "on-policy: " + ", ".join(fact for counts, fact in told if counts)


def verify(run_dir: Path, accept_of: AcceptOf = lambda attempt: None) -> Verdict:
    """Checks the whole run, which may be going on.

    ``accept_of``: what an attempt's recipe decides of a group; None where that is not known: the
    rule of membership is checked then, not the recipe's decisions.
    Raises ``ValueError`` or ``OSError`` if there is none to check.
    """
    if not (run_dir / CERTIFICATE_FILE).is_file():
        raise ValueError(f"{run_dir}: has no {CERTIFICATE_FILE}; name a run's run.output_dir")
    verdict = Verdict()
    try:
        _verify(run_dir, verdict, accept_of)
    except CertificateError as error:
        verdict.violation = error
    return verdict


def _verify(run_dir: Path, verdict: Verdict, accept_of: AcceptOf) -> None:
    traces = Traces.read(run_dir)  # first: a run that goes on meanwhile only ever adds to them
    history = History(run_dir / CERTIFICATE_FILE)
    history.take_all()
    verdict.torn, verdict.ended = history.torn, history.end is not None
    verdict.attempts, verdict.superseded = len(history.attempts), history.num_superseded
    traces.examine(history)
    if history.run is None:
        return
    order = _order(history.run)
    evidence = JournalEvidence(run_dir, history.attempts, accept_of)
    for v, batch in enumerate(history.batches):
        record = history.batch(v)
        with located(line=batch.line.number, batch=v):
            _refuse_other_prompts(order, batch.first_position, record.groups)
            evidence.examine(record)
        _count(record, verdict)
        attempt = history.attempts[PolicyVersion.parse(record.version).attempt]
        verdict.unjudged += attempt.agreement_limit is None
        verdict.unconfirmed += batch.num_unconfirmed
    verdict.decisions = evidence.num_replayed
    verdict.pruned, verdict.unjournalled = evidence.num_pruned, evidence.num_unjournalled


def _order(run: RunRecord) -> PromptOrder:
    """Which prompt is where: seed, epoch and the dataset's size say it."""
    nothing = np.zeros(0, np.int32)
    prompts = [Prompt(index, nothing, "", None) for index in range(run.num_prompts)]
    return PromptOrder(prompts, seed=run.seed, shuffle=run.shuffle, epochs=None)


def _refuse_other_prompts(order: PromptOrder, first: int, groups: Sequence[GroupOutcome]) -> None:
    """``groups``, none of them twice, have to be those of the order's prompts from ``first`` on.

    Raises ``CertificateError`` naming a prompt that is missing or not at its position.
    """
    found = [group.key for group in groups]
    wanted = [order.prompt(first + place).key for place in range(len(found))]
    is_found = set(found)
    for key in wanted:
        if key not in is_found:
            raise CertificateError("is missing, it belongs to this batch", key=key)
    for key, want in zip(found, wanted, strict=True):
        if key != want:
            raise CertificateError("is out of the dataset's order", key=key)


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


def _number(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
