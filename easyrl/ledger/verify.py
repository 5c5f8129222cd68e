"""``easyrl verify RUN_DIR``: reads certificate and journal back and says whether all is on-policy.

Nothing is taken from the trainer's word that can be found out otherwise: the prompts of each batch
follow from seed and dataset size, the versions on the tokens from the journalled groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.ledger.certificate.chain import START
from easyrl.ledger.certificate.errors import CertificateError, located
from easyrl.ledger.certificate.history import History
from easyrl.ledger.certificate.records import BatchRecord, RunRecord
from easyrl.ledger.certificate.seal import SealKey
from easyrl.ledger.evidence import AcceptOf, JournalEvidence
from easyrl.ledger.traces import Traces
from easyrl.runtime.run_files import CERTIFICATE_FILE
from easyrl.schema import Key, PolicyVersion, Prompt, WeightProof


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
    proofs: int = 0  # answers to questions about the served bits
    recomputed: int = 0  # of them, those that were formed again from the weights
    sealed: bool = False
    seals_checked: bool = False
    lines: int = 0
    chain: str = START  # hash of the last line
    published: int | None = None  # the line whose hash was given
    ended: bool = False

    @property
    def on_policy(self) -> bool:
        return self.violation is None

    def __str__(self) -> str:
        if self.violation is not None:
            return f"NOT on-policy: {self.violation}"
        batches, groups = number(self.batches, "batch", "batches"), number(self.trained, "group")
        superseded = number(self.superseded, "line")
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
                f"{number(self.unconfirmed, 'group')} of attempts that died before their "
                "endpoints' confirmations were certified",
            ),
            (self.decisions, f"{number(self.decisions, 'decision')} replayed"),
            (self.attempts > 1, f"{self.attempts} attempts, {superseded} superseded"),
            (self.unproved, f"{number(self.unproved, 'batch', 'batches')} without proof of bits"),
            (
                self.unjudged,
                f"{number(self.unjudged, 'batch', 'batches')} with log-probabilities not judged",
            ),
            (self.pruned, f"journal pruned of {number(self.pruned, 'batch', 'batches')}"),
            (self.torn, "a line cut off at the end"),
            (True, "complete" if self.ended else "not complete"),
        ]
        return "on-policy: " + ", ".join(fact for counts, fact in told if counts)

    @property
    def proofs_told(self) -> str:
        """How far the answers about served bits could be checked."""
        told = f"weights: {number(self.proofs, 'answer')} to a nonce"
        if self.recomputed < self.proofs:
            gone = self.proofs - self.recomputed
            told += f", {gone} not recomputed (the weights are gone, or were in shards)"
        return told

    @property
    def seal_told(self) -> str:
        """What guards the certificate against being written anew."""
        return seal_told(self.sealed, self.seals_checked, self.published, self.lines)


def seal_told(sealed: bool, seals_checked: bool, published: int | None, num_lines: int) -> str:
    """What guards a certificate of ``num_lines`` lines against being written anew."""
    told = "sealed, checked with --seal KEYFILE" if sealed else "not sealed"
    if sealed and seals_checked:
        told = "seals checked"
    if published is None:
        return f"{told}, compare the hash with the published one: --chain HASH"
    return f"{told}, line {published} of {num_lines} has the published hash"


AnswersOf = Callable[[str, str, WeightProof], str | None]


def verify(
    run_dir: Path,
    accept_of: AcceptOf = lambda attempt: None,
    *,
    answers_of: AnswersOf = lambda version, weights, proof: None,
    key: SealKey | None = None,
    chain: str | None = None,
) -> Verdict:
    """Checks the whole run, which may be going on.

    ``accept_of``: what an attempt's recipe decides of a group; None where that is not known: the
    rule of membership is checked then, not the recipe's decisions. ``answers_of``: the digest of
    the right answers to a proof, by the version and the digest of its weights; None where they are
    gone. ``key``: of the seals. ``chain``: a published hash, which one of the lines has to have.
    Raises ``ValueError`` or ``OSError`` if there is none to check.
    """
    if not (run_dir / CERTIFICATE_FILE).is_file():
        raise ValueError(f"{run_dir}: has no {CERTIFICATE_FILE}; name a run's run.output_dir")
    verdict = Verdict()
    try:
        _verify(run_dir, verdict, accept_of, answers_of, key, chain)
    except CertificateError as error:
        verdict.violation = error
    return verdict


def _verify(
    run_dir: Path,
    verdict: Verdict,
    accept_of: AcceptOf,
    answers_of: AnswersOf,
    key: SealKey | None,
    chain: str | None,
) -> None:
    traces = Traces.read(run_dir)  # first: a run that goes on meanwhile only ever adds to them
    history = History(run_dir / CERTIFICATE_FILE, key)
    history.take_all()
    verdict.lines, verdict.chain = history.last.number, history.last.hash
    verdict.sealed, verdict.seals_checked = bool(history.sealed), key is not None
    if chain is not None:
        verdict.published = published_line(history, chain)
    verdict.torn, verdict.ended = history.torn, history.end is not None
    verdict.attempts, verdict.superseded = len(history.attempts), history.num_superseded
    traces.examine(history)
    if history.run is None:
        return
    if history.run.source == "records":
        raise ValueError(f"{run_dir}: is a run on records; verify_records checks it")
    order = order_of(history.run)
    evidence = JournalEvidence(run_dir, history.attempts, accept_of)
    for v, batch in enumerate(history.batches):
        record = history.batch(v)
        with located(line=batch.line.number, batch=v):
            refuse_other_prompts(order, batch.first_position, [g.key for g in record.groups])
            evidence.examine(record)
            _recompute(record, verdict, answers_of)
        _count(record, verdict)
        attempt = history.attempts[PolicyVersion.parse(record.version).attempt]
        verdict.unjudged += attempt.agreement_limit is None
        verdict.unconfirmed += batch.num_unconfirmed
    verdict.decisions = evidence.num_replayed
    verdict.pruned, verdict.unjournalled = evidence.num_pruned, evidence.num_unjournalled


def published_line(history: History, chain: str) -> int:
    """The line with the hash ``chain``. Raises ``CertificateError`` if none has it."""
    number = history.hashes.get(chain)
    if number is None:
        raise CertificateError(
            f"no line has the published hash {chain}: the certificate is another one, or was "
            "written anew"
        )
    return number


def _recompute(record: BatchRecord, verdict: Verdict, answers_of: AnswersOf) -> None:
    """Raises ``CertificateError`` naming an endpoint whose answer was not right."""
    for confirmation in record.confirmations:
        if (proof := confirmation.proof) is None:
            continue
        verdict.proofs += 1
        right = answers_of(record.version, record.weights, proof)
        if right is None:
            continue
        verdict.recomputed += 1
        if right != proof.answers:
            raise CertificateError(
                f"answered {proof.answers[:16]} to the nonce {proof.nonce[:16]}, its weights give "
                f"{right[:16]}",
                endpoint=confirmation.url,
            )


def order_of(run: RunRecord) -> PromptOrder:
    """Which prompt is where: seed, epoch and the dataset's size say it."""
    nothing = np.zeros(0, np.int32)
    prompts = [Prompt(index, nothing, "", None) for index in range(run.num_prompts)]
    return PromptOrder(prompts, seed=run.seed, shuffle=run.shuffle, epochs=None)


def refuse_other_prompts(order: PromptOrder, first: int, found: Sequence[Key]) -> None:
    """What was ``found``, nothing twice, has to be the order's prompts from ``first`` on.

    Raises ``CertificateError`` naming a prompt that is missing or not at its position.
    """
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


def number(count: int, one: str, many: str | None = None) -> str:
    """``count`` with its noun."""
    return f"{count} {one if count == 1 else many or one + 's'}"
