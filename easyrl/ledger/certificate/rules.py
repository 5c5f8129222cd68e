"""The on-policy contract of one batch, as far as its line tells (DESIGN §2).

The trainer asks before each optimizer step, ``easyrl verify`` asks again of every line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import AttemptRecord, BatchRecord, CertifiedGroup
from easyrl.schema import Key, PolicyVersion


@dataclass(frozen=True)
class Context:
    """What came before a batch."""

    run: str
    attempt: AttemptRecord
    earlier: Sequence[BatchRecord]  # what earlier attempts certified for the same batch


def examine(record: BatchRecord, context: Context) -> int:
    """Raises ``CertificateError`` naming batch, prompt or endpoint of the first violation.

    Returns how many groups are recovered from an attempt that died before it certified the batch:
    which endpoints had confirmed its weights is not known.
    """
    _versions(record, context)
    dispatched = _every_prompt_once(record, context.attempt.updates_per_batch)
    _outcomes(record)
    _discarded(record, dispatched)
    confirmed = _confirmed(record, context)
    certified = _certified(record, context)
    num_unconfirmed = 0
    for group in record.groups:
        _stamps(record, group)
        if all(version in confirmed for version in group.stamped):
            _endpoints(record, group, confirmed)
        else:
            num_unconfirmed += 1
        if group.recovered:
            _as_certified(record, group, certified.get(group.key, set()))
    return num_unconfirmed


def _versions(record: BatchRecord, context: Context) -> None:
    """Own and accepted versions are of this run and batch, and of the same weights."""
    expected = str(PolicyVersion(context.run, context.attempt.attempt, record.batch))
    if record.version != expected:
        raise CertificateError(f"has version {record.version}, not {expected}", batch=record.batch)
    if record.version not in record.accepted_versions:
        raise CertificateError("does not accept its own version", batch=record.batch)
    for version in record.accepted_versions:
        try:
            run, attempt, v = PolicyVersion.parse(version)
        except ValueError as error:
            raise CertificateError(f"accepts what is {error}", batch=record.batch) from None
        if (run, v) != (context.run, record.batch) or attempt > context.attempt.attempt:
            raise CertificateError(
                f"accepts version {version}, which is not of this batch", batch=record.batch
            )
    for other in context.earlier:
        if other.version in record.accepted_versions and other.weights != record.weights:
            raise CertificateError(
                f"accepts version {other.version}, whose weights were {other.weights[:12]} and not "
                f"{record.weights[:12]}",
                batch=record.batch,
            )


def _every_prompt_once(record: BatchRecord, updates_per_batch: int) -> set[Key]:
    """The dispatched prompts; each of them has one group."""
    if not 1 <= len(record.updates) <= updates_per_batch:
        raise CertificateError(
            f"has {len(record.updates)} updates, the run takes {updates_per_batch} per batch",
            batch=record.batch,
        )
    dispatched = _unique(record, (key for keys in record.updates for key in keys), "is dispatched")
    finished = _unique(record, (group.key for group in record.groups), "has a group")
    for key in sorted(dispatched ^ finished)[:1]:
        problem = "was dispatched and has no group" if key in dispatched else "was not dispatched"
        raise CertificateError(problem, batch=record.batch, key=key)
    return dispatched


def _unique(record: BatchRecord, keys: Iterable[Key], what: str) -> set[Key]:
    seen: set[Key] = set()
    for key in keys:
        if key in seen:
            raise CertificateError(f"{what} twice", batch=record.batch, key=key)
        seen.add(key)
    return seen


def _outcomes(record: BatchRecord) -> None:
    """A group that is not excluded shares the fate of its update."""
    for i in record.skipped_updates:
        if not 0 <= i < len(record.updates):
            raise CertificateError(f"has no update {i}, which was skipped", batch=record.batch)
    fate = {
        key: "skipped" if i in record.skipped_updates else "trained"
        for i, keys in enumerate(record.updates)
        for key in keys
    }
    for group in record.groups:
        if group.outcome not in ("excluded", fate[group.key]):
            raise CertificateError(
                f"counts as {group.outcome}, its update as {fate[group.key]}",
                batch=record.batch,
                key=group.key,
            )


def _discarded(record: BatchRecord, dispatched: set[Key]) -> None:
    recovered = {group.key for group in record.groups if group.recovered}
    for key in record.discarded:
        if key in recovered:
            problem = "its journalled group was discarded, yet it was trained from the journal"
            raise CertificateError(problem, batch=record.batch, key=key)
        if key not in dispatched:
            raise CertificateError("was discarded, not dispatched", batch=record.batch, key=key)


def _confirmed(record: BatchRecord, context: Context) -> dict[str, set[str]]:
    """By version, the endpoints that are known to have confirmed it."""
    confirmed: dict[str, set[str]] = {}
    for each in [*context.earlier, record]:
        urls = confirmed.setdefault(each.version, set())
        for confirmation in each.confirmations:
            if confirmation.version != each.version:
                raise CertificateError(
                    f"confirmed version {confirmation.version}, not {each.version}",
                    batch=each.batch,
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


def _stamps(record: BatchRecord, group: CertifiedGroup) -> None:
    if group.outcome != "excluded" and not group.stamped:
        raise CertificateError("its tokens bear no version", batch=record.batch, key=group.key)
    allowed = record.accepted_versions if group.recovered else [record.version]
    for version in group.stamped:
        if version not in allowed:
            raise CertificateError(
                f"has tokens of version {version}; trained is {', '.join(allowed)}",
                batch=record.batch,
                key=group.key,
            )


def _endpoints(
    record: BatchRecord, group: CertifiedGroup, confirmed: Mapping[str, set[str]]
) -> None:
    """Each had confirmed a version on the group's tokens."""
    known = set().union(*(confirmed[version] for version in group.stamped))
    for url in group.endpoints:
        if url not in known:
            raise CertificateError(
                f"made tokens and had not confirmed {', '.join(group.stamped)}",
                batch=record.batch,
                key=group.key,
                endpoint=url,
            )


def _as_certified(record: BatchRecord, group: CertifiedGroup, certified: set[str]) -> None:
    """An earlier attempt trained on the same group, if it trained on this prompt's at all."""
    if group.digest is None:
        problem = "is from the journal, but its record's digest is not given"
        raise CertificateError(problem, batch=record.batch, key=group.key)
    if certified and group.digest not in certified:
        raise CertificateError(
            f"its journalled group ({group.digest[:12]}) is not the one that an earlier attempt "
            f"trained on with the same weights ({min(certified)[:12]}): the journal was changed",
            batch=record.batch,
            key=group.key,
        )
