"""``easyrl verify RUN_DIR``: reads certificate and journal back and says whether all is on-policy.

Nothing is taken from the trainer's word that can be found out otherwise: the prompts of each batch
follow from seed and dataset size, the versions on the tokens from the journalled groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from easyrl.ledger.certificate.errors import CertificateError, located
from easyrl.ledger.certificate.records import BatchRecord
from easyrl.ledger.certificate.seal import SealKey
from easyrl.ledger.certificate_check import (
    CertificateVerdict,
    examine_certificate,
    number,
    order_of,
    refuse_other_prompts,
)
from easyrl.ledger.evidence import AcceptOf, JournalEvidence
from easyrl.runtime.run_files import CERTIFICATE_FILE
from easyrl.schema import BASE_PROOF_HOLDS, PolicyVersion, WeightProof


@dataclass
class Verdict(CertificateVerdict):
    """What was found of a run on rollouts; what is trained or skipped are groups."""

    excluded: int = 0  # groups without usable responses
    rejected: int = 0  # groups that the recipe did not want
    decisions: int = 0  # whose outcome was found again from the journal
    recovered: int = 0  # groups from the journal of an earlier attempt
    unconfirmed: int = 0  # of them, those whose endpoints' confirmations died with that attempt
    discarded: int = 0  # groups journalled for other weights, generated again
    unproved: int = 0  # batches with an endpoint whose weights were not read back
    unjudged: int = 0  # batches whose log-probabilities were held to no limit
    unjournalled: int = 0  # groups without a record to compare with
    pruned: int = 0  # batches that the journal has removed, as it may
    proofs: int = 0  # answers to questions about the served bits
    recomputed: int = 0  # of them, those that were formed again from the weights
    episodes: int = 0  # of trained groups whose samples are episodes
    turns: int = 0  # of them
    branches: int = 0
    episodes_without_turns: int = 0  # whose turns were not journalled one by one
    untrained_turns: int = 0  # journalled, of episodes that were cut off or not taken
    base_age: int | None = None  # batches for which a proof of the model below adapters stood

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
            (
                self.episodes,
                f"{number(self.episodes, 'episode')} of {number(self.turns, 'turn')} in "
                f"{number(self.branches, 'branch', 'branches')}",
            ),
            (
                self.episodes_without_turns,
                f"{self.episodes_without_turns} without journalled turns",
            ),
            (
                self.untrained_turns,
                f"{number(self.untrained_turns, 'journalled turn')} of episodes that were not "
                "trained",
            ),
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
        if self.base_age is not None:
            told += (
                "; the model below the adapters was proved in the batch or up to "
                f"{number(self.base_age, 'batch', 'batches')} before"
            )
        return told


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
    history = examine_certificate(run_dir, verdict, key, chain)
    if history.run is None:
        return
    if history.run.source == "records":
        raise ValueError(f"{run_dir}: is a run on records; verify_records checks it")
    order = order_of(history.run)
    evidence = JournalEvidence(run_dir, history.attempts, accept_of)
    bases: dict[tuple[str, str], int] = {}
    for v, batch in enumerate(history.batches):
        record = history.batch(v)
        with located(line=batch.line.number, batch=v):
            refuse_other_prompts(order, batch.first_position, [g.key for g in record.groups])
            evidence.examine(record)
            _recompute(record, verdict, answers_of)
            _age_bases(record, verdict, bases)
        _count(record, verdict)
        attempt = history.attempts[PolicyVersion.parse(record.version).attempt]
        verdict.unjudged += attempt.agreement_limit is None
        verdict.unconfirmed += batch.num_unconfirmed
    verdict.decisions = evidence.num_replayed
    verdict.episodes, verdict.turns = evidence.num_episodes, evidence.num_turns
    verdict.branches = evidence.num_branches
    verdict.episodes_without_turns = evidence.num_episodes_without_turns
    verdict.untrained_turns = evidence.num_untrained_turns
    verdict.pruned, verdict.unjournalled = evidence.num_pruned, evidence.num_unjournalled


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


def _age_bases(record: BatchRecord, verdict: Verdict, first: dict[tuple[str, str], int]) -> None:
    """How long answers about the model below adapters are repeated; ``first``: the batch in which
    each was given, by URL and nonce.

    Raises ``CertificateError`` naming an endpoint that should have been asked again.
    """
    for confirmation in record.confirmations:
        if (base := confirmation.base) is None:
            continue
        age = record.batch - first.setdefault((confirmation.url, base.nonce), record.batch)
        verdict.base_age = max(age, verdict.base_age or 0)
        if age > BASE_PROOF_HOLDS:
            raise CertificateError(
                f"proved the model below its adapter {age} batches before, which holds for "
                f"{BASE_PROOF_HOLDS}",
                endpoint=confirmation.url,
            )


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
