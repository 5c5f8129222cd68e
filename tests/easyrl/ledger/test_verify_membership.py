"""What ``easyrl verify`` says of rejected and excluded groups, and of batches cut short."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import BatchRecord
from easyrl.ledger.journal.codec import GroupRecord
from easyrl.ledger.verify import Verdict, verify
from easyrl.schema import Exclusion, GroupOutcome, Key, RolloutGroup
from tests.easyrl.ledger.certificate_violations import first_group, with_another
from tests.easyrl.ledger.certified_run import (
    EXCLUDED,
    REJECTED,
    CertifiedRun,
    with_refused,
)

replace = msgspec.structs.replace
FILE = "journal/batch-000001/attempt0-rank0.journal"

# ``refused_run``: of batch 1, the positions of what is not trained
REJECTED_AT, EXCLUDED_AT = 1, 3
PLACES = {(1, REJECTED_AT): "rejected", (1, EXCLUDED_AT): "excluded", (2, 1): "rejected"}


@pytest.fixture
def refused_run(tmp_path: Path) -> CertifiedRun:
    """Batches of 4, 6 and 2 prompts; lines as in ``test_verify``."""
    run = with_refused(tmp_path, PLACES)
    run.begin()
    run.train_all()
    assert [len(batch) for batch in run.batches] == [4, 6, 2]
    return run


def recipe(run: CertifiedRun, *, changed: frozenset[Key] = frozenset()):
    """The ``accept`` that made ``run``; of the prompts in ``changed`` it says the opposite."""

    def accept(group: RolloutGroup) -> str | None:
        key = group.prompt.key
        assert group.completions, "an excluded group is not the recipe's to decide"
        rejects = (run.refused.get(key) == "rejected") != (key in changed)
        return REJECTED if rejects else None

    return accept


def replayed(run: CertifiedRun, **recipe_changes: frozenset[Key]) -> Verdict:
    return verify(run.folder, lambda attempt: recipe(run, **recipe_changes))


def violation(run: CertifiedRun) -> CertificateError:
    """Found without the recipe, and with it."""
    found = verify(run.folder).violation
    assert found is not None and str(replayed(run).violation) == str(found)
    return found


# ---- in order ------------------------------------------------------------------------------------


def test_refused_groups_are_told_and_their_decisions_replayed(refused_run: CertifiedRun) -> None:
    told = "on-policy: 3 batches, 9 groups trained, 1 excluded, 2 rejected"
    assert str(verify(refused_run.folder)) == f"{told}, complete"
    assert str(replayed(refused_run)) == f"{told}, 12 decisions replayed, complete"


def test_each_attempt_is_judged_by_its_own_recipe(tmp_path: Path) -> None:
    """The second attempt's refuses less, and is not asked about the batches of the first."""
    run = with_refused(tmp_path, PLACES)
    run.begin()
    run.train()
    run.train()
    first, kept = run.refused, run.batches[:2]
    run.begin(2)
    run.refused, run.batches = {}, kept
    run.give_epochs(2)
    run.train_all()

    def accept_of(attempt: int):
        return lambda group: REJECTED if not attempt.attempt and group.prompt.key in first else None

    assert verify(tmp_path, accept_of).on_policy
    found = verify(tmp_path, lambda attempt: accept_of(replace(attempt, attempt=1))).violation
    assert found is not None and found.batch == 1 and found.key == run.batches[1][REJECTED_AT].key
    # of an attempt whose recipe is not known, only the rule of membership is checked
    verdict = verify(tmp_path, lambda attempt: accept_of(attempt) if attempt.attempt else None)
    assert verdict.on_policy and verdict.decisions == len(run.batches[2])


def test_recovered_refused_groups_count_again_in_a_resumed_run(tmp_path: Path) -> None:
    """On another number of ranks too: batch 0 has the same weights on any."""
    run = with_refused(tmp_path, {(0, 1): "rejected", (0, 2): "excluded"})
    run.begin(num_ranks=1)
    run.generate(3)  # killed with one accepted group
    run.begin(0, num_ranks=2)
    record = run.generate()
    assert [group.recovered for group in record.groups] == 3 * [True] + 3 * [False]
    assert [group.outcome for group in record.groups[:3]] == ["trained", "rejected", "excluded"]
    assert [group.rank for group in record.groups] == [0, 1, 0, 1, 0, 1]
    run.certificate.close_batch(record)
    verdict = replayed(run)
    assert verdict.on_policy, verdict
    assert (verdict.trained, verdict.rejected, verdict.excluded) == (4, 1, 1)
    assert (verdict.recovered, verdict.unconfirmed) == (3, 2)  # nobody made the excluded one


def test_a_batch_that_the_orders_end_cuts_short(tmp_path: Path) -> None:
    run = with_refused(tmp_path, {(2, 0): "rejected", (2, 3): "excluded"}, updates_per_batch=2)
    certificate = run.begin()
    run.train()
    run.train()
    record = run.generate()
    assert (record.ended_by, record.num_drawn, record.num_updates) == ("data", 4, 1)
    assert [group.update for group in record.groups if group.accepted] == [0, 0]
    for wrong in ("accepted", "max_draws"):
        with pytest.raises(CertificateError, match=f"was ended by {wrong}, not data"):
            certificate.check(replace(record, ended_by=wrong), whole=True)
    certificate.close_batch(record)
    certificate.end("")
    assert str(verify(tmp_path)) == (
        "on-policy: 3 batches, 10 groups trained, 1 excluded, 1 rejected, complete"
    )


def test_a_batch_has_as_many_updates_as_its_groups_make(tmp_path: Path) -> None:
    """Two of four groups are one update of two, with a step of its own."""
    run = CertifiedRun(tmp_path, num_prompts=6, epochs=1, updates_per_batch=2)
    run.begin()
    run.train_all()
    assert [len(batch) for batch in run.batches] == [4, 2] and run.steps == [2, 3]
    assert verify(tmp_path).on_policy
    run.forge_batch(1, lambda r: replace(r, num_updates=2, step=4))
    assert "has 2 updates, its 2 accepted groups make 1" in str(violation(run))
    run.forge_batch(1, lambda r: replace(r, num_updates=1))
    assert "step 4 is not behind step 2 of the batch before" in str(violation(run))


def test_a_batch_that_the_bound_cuts_short(tmp_path: Path) -> None:
    places = {(1, 0): "rejected", (1, 2): "rejected"}
    run = with_refused(tmp_path, places, max_draws=5)
    certificate = run.begin()
    run.train()
    record = run.generate()
    assert (record.ended_by, record.num_drawn) == ("max_draws", 5)
    assert [len(run.accepted(v)) for v in range(3)] == [4, 3, 3]
    for wrong in ("accepted", "data"):
        with pytest.raises(CertificateError, match=f"was ended by {wrong}, not max_draws"):
            certificate.check(replace(record, ended_by=wrong), whole=True)
    more = with_another(record, run.batches[2][0].key)
    with pytest.raises(CertificateError, match="was drawn at position 5, but the 5 prompts before"):
        certificate.check(more, whole=True)
    certificate.close_batch(record)
    run.begin(1)  # its batch 1 has to be the same again, and is in the journal
    run.train_all()
    verdict = replayed(run)
    assert verdict.on_policy and (verdict.rejected, verdict.trained) == (2, 10)


def test_a_run_without_a_number_of_epochs(tmp_path: Path) -> None:
    """It goes on through the prompts as long as it has steps; each time in another order."""
    run = with_refused(tmp_path, {(3, 1): "rejected"}, epochs=None, num_batches=8)
    run.begin()
    run.train_all()
    assert max(prompt.epoch for batch in run.batches for prompt in batch) == 5
    assert [len(batch) for batch in run.batches] == [4, 4, 4, 5, 4, 4, 4, 4]
    verdict = replayed(run)
    assert str(verdict) == (
        "on-policy: 8 batches, 32 groups trained, 1 rejected, 33 decisions replayed, complete"
    )
    run.forge_batch(7, lambda r: replace(last_of(r), ended_by="data"))
    found = violation(run)
    assert found.batch == 7 and "prompts are missing, it may draw 4" in str(found)


def test_an_epoch_behind_the_last_is_no_prompt_of_an_endless_run(tmp_path: Path) -> None:
    run = CertifiedRun(tmp_path, epochs=None, num_batches=2)
    run.begin()
    run.train_all()
    run.forge_batch(1, lambda r: first_group(r, epoch=9))
    assert "prompt 3 of epoch 9: no such prompt" in str(violation(run)).replace(
        f"prompt {run.batches[1][0].index} ", "prompt 3 "
    )


def last_of(record: BatchRecord) -> BatchRecord:
    """Without its last group."""
    return replace(record, groups=record.groups[:-1], num_drawn=record.num_drawn - 1)


# ---- planted -------------------------------------------------------------------------------------


def decided(group: GroupOutcome, outcome: str, reason: str | None) -> GroupOutcome:
    return replace(group, outcome=outcome, reason=reason)


def decide(v_positions: dict[int, tuple[str, str | None]]):
    """An edit of a batch's line: by position, outcome and reason."""

    def edit(record: BatchRecord) -> BatchRecord:
        groups = [
            decided(group, *v_positions.get(group.position, (group.outcome, group.reason)))
            for group in record.groups
        ]
        return replace(record, groups=groups)

    return edit


TRAINED = ("trained", None)

# By what was forged in the certificate only: batch, edit, problem, whether the journal finds it.
CERTIFICATE_ONLY = {
    "invented": (1, decide({0: ("rejected", REJECTED)}), "prompts are missing", False),
    "invented where the order ends": (
        2,
        decide({0: ("rejected", REJECTED)}),
        "accepted: False in the certificate, True in the journal",
        True,
    ),
    "dropped": (1, decide({REJECTED_AT: TRAINED}), "already make up the batch", False),
    "dropped where the order ends": (
        2,
        decide({1: TRAINED}),
        "accepted: True in the certificate, False in the journal",
        True,
    ),
    "moved": (
        1,
        decide({0: ("rejected", REJECTED), REJECTED_AT: TRAINED}),
        "accepted: False in the certificate, True in the journal",
        True,
    ),
    "another reason": (
        1,
        decide({REJECTED_AT: ("rejected", "too easy")}),
        f"reason: too easy in the certificate, {REJECTED} in the journal",
        True,
    ),
    "an exclusion moved": (
        1,
        decide({0: ("excluded", EXCLUDED), EXCLUDED_AT: TRAINED}),
        "its tokens bear no version",
        False,
    ),
}


@pytest.mark.parametrize("name", CERTIFICATE_ONLY)
def test_a_rejection_forged_in_the_certificate_only(name: str, refused_run: CertifiedRun) -> None:
    v, edit, problem, in_journal = CERTIFICATE_ONLY[name]
    refused_run.forge_batch(v, edit)
    found = violation(refused_run)
    assert (found.batch, found.line) == (v, 3 + v) and problem in str(found)
    assert (found.file is not None) == in_journal


def by_position(changes: dict[int, dict]):
    """An edit of a journal's groups."""
    return lambda group: msgspec.structs.replace(group, **changes.get(group.position, {}))


JOURNAL_ONLY = {
    "invented": ({0: {"rejected": REJECTED}}, 0, "accepted: True in the certificate, False"),
    "dropped": (
        {REJECTED_AT: {"rejected": None}},
        REJECTED_AT,
        "accepted: False in the certificate, True",
    ),
    "moved": (
        {0: {"rejected": REJECTED}, REJECTED_AT: {"rejected": None}},
        0,
        "accepted: True in the certificate, False",
    ),
    "to another position": (
        {0: {"position": REJECTED_AT}, REJECTED_AT: {"position": 0}},
        0,
        "position: 0 in the certificate, 1 in the journal",
    ),
    "another reason": (
        {REJECTED_AT: {"rejected": "too easy"}},
        REJECTED_AT,
        f"reason: {REJECTED} in the certificate, too easy in the journal",
    ),
    "excluded instead": (
        {REJECTED_AT: {"excluded": Exclusion("refused", EXCLUDED)}},
        REJECTED_AT,
        "reason: ",
    ),
}


@pytest.mark.parametrize("with_digest", [False, True])
@pytest.mark.parametrize("name", JOURNAL_ONLY)
def test_a_rejection_forged_in_the_journal_only(
    name: str, with_digest: bool, refused_run: CertifiedRun
) -> None:
    """With its checksum; and where the certificate's digests are made to fit it."""
    changes, position, problem = JOURNAL_ONLY[name]
    digests = refused_run.forge_journal(1, by_position(changes))
    if with_digest:
        refused_run.forge_batch(1, lambda r: with_digests(r, digests))
    else:
        problem = "the journal was changed"
    found = violation(refused_run)
    assert (found.batch, found.line, found.file) == (1, 4, FILE) and problem in str(found)
    assert found.key == refused_run.batches[1][position].key


@pytest.mark.parametrize(
    ("logprob", "said"), [(0.5, "above 0"), (np.nan, "missing or not a number")]
)
def test_a_trained_response_that_could_not_be_is_named(
    logprob: float, said: str, refused_run: CertifiedRun
) -> None:
    """Of a closed batch it is evidence: it stays, and the verdict names it."""

    def spoil(group: GroupRecord) -> GroupRecord:
        if group.position != 0:
            return group
        first, second, *others = group.completions
        values = np.frombuffer(second.logprobs, "<f4").copy()
        values[3] = logprob
        return replace(
            group, completions=[first, replace(second, logprobs=values.tobytes()), *others]
        )

    digests = refused_run.forge_journal(1, spoil)
    refused_run.forge_batch(1, lambda r: with_digests(r, digests))
    found = violation(refused_run)
    assert (found.batch, found.file) == (1, FILE) and found.key == refused_run.batches[1][0].key
    assert "response 1: logprobs[3] is" in str(found) and said in str(found)


def with_digests(record: BatchRecord, digests: dict[Key, str]) -> BatchRecord:
    return replace(record, groups=[replace(g, digest=digests[g.key]) for g in record.groups])


CONSISTENT = {
    "invented": ([REJECTED_AT], f"is rejected ({REJECTED}) in certificate and journal", "accepted"),
    "dropped": ([0], "is accepted in certificate and journal", f"rejected ({REJECTED})"),
    "moved": ([0, REJECTED_AT], "is accepted in certificate and journal", f"rejected ({REJECTED})"),
}


@pytest.mark.parametrize("name", CONSISTENT)
def test_a_rejection_forged_in_both_is_found_by_the_recipe(
    name: str, refused_run: CertifiedRun
) -> None:
    """A trainer that decides otherwise than its recipe leaves a consistent folder."""
    positions, told, said = CONSISTENT[name]
    keys = [refused_run.batches[1][position].key for position in positions]
    assert verify(refused_run.folder).on_policy
    found = replayed(refused_run, changed=frozenset(keys)).violation
    assert found is not None
    assert (found.batch, found.line, found.key, found.file) == (1, 4, keys[0], FILE)
    assert told in str(found) and str(found).endswith(f"its recipe says: {said}")


def test_another_reason_than_the_recipes(refused_run: CertifiedRun) -> None:
    def accept(group: RolloutGroup) -> str | None:
        return recipe(refused_run)(group) and "another reason"

    found = verify(refused_run.folder, lambda attempt: accept).violation
    assert found is not None and found.key == refused_run.batches[1][REJECTED_AT].key
    assert "its recipe says: rejected (another reason)" in str(found)
