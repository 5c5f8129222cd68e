"""The on-policy contract of one batch, as far as its line tells (docs/on_policy.md).

The trainer asks before each optimizer step, ``easyrl verify`` asks again of every line. Whoever
asks says which batch it is: the errors name prompt and endpoint only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.ledger.certificate.errors import CertificateError, located
from easyrl.ledger.certificate.records import AttemptRecord, BatchRecord, RunRecord
from easyrl.metrics.logprob_agreement import disagreements
from easyrl.schema import APART, GroupOutcome, Key, PolicyVersion, WeightProof

HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Context:
    """What came before a batch."""

    run: RunRecord
    attempt: AttemptRecord
    earlier: Sequence[BatchRecord]  # what earlier attempts certified for the same batch
    num_left: int | None  # prompts that the order had for it; None: no end


def examine(record: BatchRecord, context: Context, *, whole: bool = True) -> int:
    """Raises ``CertificateError`` naming prompt or endpoint of the first violation.

    ``whole``: the batch is over; else more updates, and more groups, may follow. Returns how many
    groups are recovered from an attempt that died before it certified the batch: which endpoints
    had confirmed its weights is not known.
    """
    if context.run.source != "rollouts":
        raise CertificateError("is a batch of rollouts in a run on records")
    _versions(record, context)
    _every_prompt_once(record, context.attempt.updates_per_batch)
    _outcomes(record)
    if whole:
        _membership(record, context)
    else:
        _whole_updates(record, context)
    _discarded(record)
    _agreement(record, context.attempt.agreement_limit)
    confirmed = _confirmed(record, context)
    _proofs(record)
    certified = _certified(record, context)
    num_unconfirmed = 0
    for group in record.groups:
        with located(key=group.key):
            _stamps(record, group)
            if all(version in confirmed for version in group.stamped):
                _endpoints(group, confirmed)
            else:
                num_unconfirmed += 1
            if group.recovered:
                _as_certified(group, certified.get(group.key, set()))
    return num_unconfirmed


def _versions(record: BatchRecord, context: Context) -> None:
    """Own and accepted versions are of this run and batch, and of the same weights."""
    expected = str(PolicyVersion(context.run.run, context.attempt.attempt, record.batch))
    if record.version != expected:
        raise CertificateError(f"has version {record.version}, not {expected}")
    if record.version not in record.accepted_versions:
        raise CertificateError("does not accept its own version")
    for version in record.accepted_versions:
        try:
            run, attempt, v = PolicyVersion.parse(version)
        except ValueError as error:
            raise CertificateError(f"accepts what is {error}") from None
        if (run, v) != (context.run.run, record.batch) or attempt > context.attempt.attempt:
            raise CertificateError(f"accepts version {version}, which is not of this batch")
    for other in context.earlier:
        if other.version in record.accepted_versions and other.weights != record.weights:
            raise CertificateError(
                f"accepts version {other.version}, whose weights were {other.weights[:12]} and not "
                f"{record.weights[:12]}"
            )


def _every_prompt_once(record: BatchRecord, updates_per_batch: int) -> None:
    """Each drawn prompt has one group, in the order of their positions."""
    if not 1 <= record.num_updates <= updates_per_batch:
        raise CertificateError(
            f"has {record.num_updates} updates, the run takes {updates_per_batch} per batch"
        )
    drawn: set[Key] = set()
    before = -1
    for group in record.groups:
        if group.key in drawn:
            raise CertificateError("has a group twice", key=group.key)
        if group.position <= before:
            raise CertificateError(
                f"is at position {group.position}, behind position {before}", key=group.key
            )
        drawn.add(group.key)
        before = group.position


def _outcomes(record: BatchRecord) -> None:
    """A group that is not refused shares the outcome of its update."""
    for i in record.skipped_updates:
        if not 0 <= i < record.num_updates:
            raise CertificateError(f"has no update {i}, which was skipped")
    for group in record.groups:
        expected = "skipped" if group.update in record.skipped_updates else "trained"
        problem = None
        if group.drawn_by is not None and (why := _bad_drawer(record, group)) is not None:
            problem = why
        elif not group.accepted:
            problem = None if group.reason else f"is {group.outcome} without a reason"
        elif not 0 <= group.update < record.num_updates:
            problem = f"is of update {group.update}, there are {record.num_updates}"
        elif group.outcome != expected:
            problem = f"counts as {group.outcome}, its update as {expected}"
        if problem is not None:
            raise CertificateError(problem, key=group.key)


def _bad_drawer(record: BatchRecord, group: GroupOutcome) -> str | None:
    """What is wrong with the rank that is said to have drawn a group for another one."""
    drawn_by = group.drawn_by
    assert drawn_by is not None
    if drawn_by == group.rank:
        return f"was drawn by rank {drawn_by} for itself"
    # an earlier attempt may have had more ranks
    if drawn_by < 0 or (drawn_by >= record.num_ranks and not group.recovered):
        return f"was drawn by rank {drawn_by} of {record.num_ranks}"
    return None


def _whole_updates(record: BatchRecord, context: Context) -> None:
    """Of a batch that goes on, every update so far has all of its groups."""
    size = context.run.batch_size // context.attempt.updates_per_batch
    counts = Counter(group.update for group in record.groups if group.accepted)
    for update in range(record.num_updates):
        if counts[update] != size:
            raise CertificateError(f"update {update} has {counts[update]} groups, it takes {size}")


def _membership(record: BatchRecord, context: Context) -> None:
    """What was drawn is what the decisions make it: position p is drawn when p < B + R."""
    k = context.attempt.updates_per_batch
    membership = BatchMembership(
        context.run.batch_size, k, num_left=context.num_left, max_draws=context.attempt.max_draws
    )
    if record.num_drawn != len(record.groups):
        raise CertificateError(
            f"has {len(record.groups)} groups and {record.num_drawn} drawn prompts"
        )
    for position, group in enumerate(record.groups):
        if group.position != position:
            raise CertificateError(
                f"is at position {group.position}, {position} has no group", key=group.key
            )
        if position >= membership.bound:
            raise CertificateError(
                f"was drawn at position {position}, but the {position} prompts before it already "
                "make up the batch",
                key=group.key,
            )
        number = membership.num_accepted
        update = number * k // context.run.batch_size
        if group.accepted and group.update != update:
            raise CertificateError(
                f"is of update {group.update}; accepted group number {number} belongs to "
                f"update {update}",
                key=group.key,
            )
        membership.decide(position, group.accepted)
    if not membership.complete:
        raise CertificateError(
            f"has {membership.num_accepted} accepted groups of {record.num_drawn} prompts: "
            f"prompts are missing, it may draw {membership.bound}"
        )
    if membership.ended_by != record.ended_by:
        raise CertificateError(f"was ended by {record.ended_by}, not {membership.ended_by}")
    num_updates = max(membership.num_known_updates, 1)
    if record.num_updates != num_updates:
        raise CertificateError(
            f"has {record.num_updates} updates, its {membership.num_accepted} accepted groups make "
            f"{num_updates}"
        )


def _discarded(record: BatchRecord) -> None:
    recovered = {group.key: group.recovered for group in record.groups}
    for key in record.discarded:
        if key not in recovered:
            raise CertificateError("was discarded, not drawn", key=key)
        if recovered[key]:
            problem = "its journalled group was discarded, yet it was trained from the journal"
            raise CertificateError(problem, key=key)


def _agreement(record: BatchRecord, limit: float | None) -> None:
    """Each endpoint's log-probabilities are the trainer's, up to rounding."""
    for url, problem in disagreements(record.agreement, limit).items():
        raise CertificateError(problem, endpoint=url)


def _proofs(record: BatchRecord) -> None:
    """Who proved bits has answered a question; the same question has the same right answer."""
    right: dict[tuple[str, int], str] = {}
    for each in record.confirmations:
        problem = None
        if each.proof is None:
            problem = "proved its bits, but no answer is recorded" if each.bits_proved else None
        elif not each.bits_proved:
            problem = "has an answer recorded, but did not prove its bits"
        elif record.weights.startswith(APART) != (each.base is not None):
            problem = (
                "proved the model below an adapter, which the batch's weights do not have"
                if each.base is not None
                else "proved an adapter, and not the model below it"
            )
        for proof in (each.proof, each.base):
            if proof is not None:
                problem = problem or _wrong_answer(proof, right)
        if problem is not None:
            raise CertificateError(problem, endpoint=each.url)


def _wrong_answer(proof: WeightProof, right: dict[tuple[str, int], str]) -> str | None:
    """What is wrong with an answer, in words; ``right``: those of whole models, by question."""
    if not (HASH.fullmatch(proof.nonce) and HASH.fullmatch(proof.answers)):
        return "has no nonce of 64 hex digits, or no such digest of its answers"
    if proof.num_workers < 1 or proof.num_tensors < 1:
        return f"proved {proof.num_tensors} tensors in {proof.num_workers} workers"
    asked = (proof.nonce, proof.num_tensors)
    if proof.whole and right.setdefault(asked, proof.answers) != proof.answers:
        return "answered otherwise than another endpoint with the same nonce"
    return None


def _confirmed(record: BatchRecord, context: Context) -> dict[str, set[str]]:
    """By version, the endpoints that are known to have confirmed it."""
    confirmed: dict[str, set[str]] = {}
    for each in [*context.earlier, record]:
        urls = confirmed.setdefault(each.version, set())
        for confirmation in each.confirmations:
            if confirmation.version != each.version:
                raise CertificateError(
                    f"confirmed version {confirmation.version}, not {each.version}",
                    endpoint=confirmation.url,
                )
            urls.add(confirmation.url)
    return confirmed


def _certified(record: BatchRecord, context: Context) -> dict[Key, set[str]]:
    """By prompt, the digests of the groups that earlier attempts trained on with these weights."""
    certified: dict[Key, set[str]] = {}
    for other in context.earlier:
        if other.weights == record.weights:
            for group in other.groups:
                if group.digest is not None:
                    certified.setdefault(group.key, set()).add(group.digest)
    return certified


def _stamps(record: BatchRecord, group: GroupOutcome) -> None:
    if group.outcome != "excluded" and not group.stamped:
        raise CertificateError("its tokens bear no version")
    allowed = record.accepted_versions if group.recovered else [record.version]
    for version in group.stamped:
        if version not in allowed:
            raise CertificateError(
                f"has tokens of version {version}; trained is {', '.join(allowed)}"
            )


def _endpoints(group: GroupOutcome, confirmed: Mapping[str, set[str]]) -> None:
    """Each had confirmed a version on the group's tokens."""
    known = set().union(*(confirmed[version] for version in group.stamped))
    for url in group.endpoints:
        if url not in known:
            raise CertificateError(
                f"made tokens and had not confirmed {', '.join(group.stamped)}", endpoint=url
            )


def _as_certified(group: GroupOutcome, certified: set[str]) -> None:
    """An earlier attempt trained on the same group, if it trained on this prompt's at all."""
    if group.digest is None:
        raise CertificateError("is from the journal, but its record's digest is not given")
    if certified and group.digest not in certified:
        raise CertificateError(
            f"its journalled group ({group.digest[:12]}) is not the one that an earlier attempt "
            f"trained on with the same weights ({min(certified)[:12]}): the journal was changed"
        )
