"""Batches whose prompts are replaced, that begin again, or that end the run."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.schema import (
    NEEDS_CHANGE,
    TEMPORARY_FAILURE,
    BatchWithdrawn,
    Exclusion,
    InterruptedRun,
    Progress,
)
from tests.easyrl.trainer.fake_parts import (
    FakeBatch,
    FakeEngine,
    FakeEvaluation,
    FakeLedger,
    FakeOutage,
    FakeRollouts,
    FakeStream,
    FakeSync,
    group,
    make_trainer,
)


def refusing(**reasons):
    """A ``make`` that gives up or rejects the groups of some prompts: ``excluded={1: "..."}``."""

    def make(index, version):
        made = group(index, version)
        if index in reasons.get("excluded", {}):
            problem = reasons["excluded"][index]
            return replace(made, completions=(), scores=(), excluded=Exclusion("refused", problem))
        return replace(made, rejected=reasons.get("rejected", {}).get(index))

    return make


def recorder(events):
    return lambda event, **fields: events.append({"event": event, **fields})


# ---- replaced groups -----------------------------------------------------------------------------


def test_refused_groups_are_replaced_and_the_next_batch_begins_behind_them():
    events, ledger = [], FakeLedger([])
    make = refusing(rejected={0: "flat", 3: "flat"}, excluded={1: "too long"})
    trainer, reported = make_trainer(events, num_prompts=8, make=make, ledger=ledger)
    trainer.fit()
    begun = [event for event in events if event.startswith("begin")]
    assert begun == ["begin [0, 1, 2, 3, 4] run:0:0", "begin [5, 6] run:0:1", "begin [7] run:0:2"]
    assert events.count("step /12") == 2 and events.count("step /6") == 1
    first, second, last = ledger.closed
    assert [(g.index, g.position, g.outcome, g.reason) for g in first.groups] == [
        (0, 0, "rejected", "flat"),
        (1, 1, "excluded", "too long"),
        (2, 2, "trained", None),
        (3, 3, "rejected", "flat"),
        (4, 4, "trained", None),
    ]
    assert [each.num_drawn for each in ledger.closed] == [5, 2, 1]
    assert [each.ended_by for each in ledger.closed] == ["accepted", "accepted", "data"]
    assert trainer.progress.position == 8
    metrics = reported[1][1]
    assert (metrics["batch/groups"], metrics["batch/groups_drawn"]) == (2.0, 5.0)
    assert (metrics["batch/groups_rejected"], metrics["batch/groups_excluded"]) == (2.0, 1.0)
    assert metrics["reward/mean"] == 0.5  # of what is trained


def test_a_batch_that_accepts_nothing_shows_the_reasons():
    events, ledger = [], FakeLedger([])
    make = refusing(rejected={0: "flat", 2: "flat", 3: "too easy"}, excluded={1: "too long"})
    trainer, reported = make_trainer(events, num_batches=2, make=make, ledger=ledger)
    with pytest.raises(InterruptedRun) as raised:
        trainer.fit()
    assert raised.value.status == NEEDS_CHANGE
    assert str(raised.value).splitlines() == [
        "batch 0 has drawn 4 prompts and accepted none:",
        "  excluded: too long",
        "  rejected: flat",
        "  rejected: too easy",
        "(look at rewards and recipe, or let a batch draw more: trainer.max_draws_per_batch)",
        "step 0 is saved; go on with --resume",
    ]
    assert events[-1] == "batch closed" and ledger.closed == [] and ledger.checked == []
    assert trainer.progress.step == trainer.progress.position == 0
    assert [step for step, _ in reported] == [0]


def test_a_batch_that_ends_before_its_last_update_takes_only_those_that_have_groups():
    events, ledger = [], FakeLedger([])
    make = refusing(rejected={1: "flat"})
    trainer, _ = make_trainer(events, num_batches=1, make=make, ledger=ledger, updates_per_batch=2)
    trainer.fit()
    assert events.count("step /6") == 1 and trainer.progress.step == 1
    [account] = ledger.closed
    assert (account.num_updates, account.num_drawn, account.ended_by) == (1, 2, "data")
    assert [(g.index, g.update, g.outcome) for g in account.groups] == [
        (0, 0, "trained"),
        (1, 0, "rejected"),
    ]


def test_a_batch_that_was_cut_short_does_not_take_the_run_beyond_max_steps():
    """Steps 1, 3, and no batch that would end with step 5."""
    events = []
    ledger = FakeLedger(events)
    make = refusing(rejected={index: "flat" for index in range(1, 20)})
    trainer, reported = make_trainer(
        events, num_prompts=40, make=make, ledger=ledger, updates_per_batch=2, max_steps=4
    )
    trainer.fit()
    assert [account.num_updates for account in ledger.closed] == [1, 2]
    assert ledger.closed[0].ended_by == "max_draws" and ledger.closed[0].num_drawn == 20
    assert trainer.progress.step == 3 and [step for step, _ in reported] == [0, 1, 3]
    assert events[-1].startswith("end")


# ---- groups that are taken back ------------------------------------------------------------------

REASON = "http://fake:1 failed its proof"


class WithdrawnStream(FakeStream):
    """One group; then groups of the batch were taken back."""

    def drain_ready(self, max_tokens, idle=None):
        if len(self.groups) == 1:
            raise BatchWithdrawn(REASON)
        return super().drain_ready(max_tokens, idle)


def first_batch(trainer, kind, attribute):
    """The first batch, or its first streams, of another kind."""
    usual = getattr(FakeRollouts, attribute)
    kinds = iter(kind)
    setattr(trainer.rollouts, attribute, lambda *parts: next(kinds, usual)(*parts))


def assert_trained_once(trainer, events, reported, ledger, told):
    """One batch of two groups, whatever was withdrawn before."""
    assert events.count("begin [0, 1] run:0:0") == 2
    assert [event for event in events if event.startswith("step")] == ["step /12"]
    assert events.count("certify 0") == 1 and "save" not in events
    [account] = ledger.closed
    assert Counter(group.key for group in account.groups) == {(0, 0): 1, (0, 1): 1}
    assert trainer.progress == Progress(1, 1, 0, 2, "weights 1", 1)
    metrics = reported[1][1]
    assert metrics["batch/groups"] == metrics["batch/groups_drawn"] == 2.0
    assert metrics["tokens/packed"] == 2 * (2 + 6) and metrics["batch/micro_batches"] == 2
    withdrawn = [each for each in told if each["event"] == "batch_withdrawn"]
    assert withdrawn == [{"event": "batch_withdrawn", "version": "run:0:0", "problem": REASON}]
    assert sum(each["event"] == "group_closed" for each in told) == 2


def test_a_withdrawn_batch_begins_again_and_counts_nothing_twice():
    events, told = [], []
    ledger = FakeLedger(events)
    trainer, reported = make_trainer(events, num_batches=1, ledger=ledger, record=recorder(told))
    first_batch(trainer, [WithdrawnStream], "stream")
    trainer.fit()
    assert events[1:5] == ["begin [0, 1] run:0:0", "backward", "discard", "batch closed"]
    assert_trained_once(trainer, events, reported, ledger, told)


class WithdrawnBatch(FakeBatch):
    """Taken back when all of its groups have been handed out."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.withdrawn = REASON


def test_a_withdrawal_behind_the_last_group_is_seen_before_the_step():
    events, told = [], []
    ledger = FakeLedger(events)
    trainer, reported = make_trainer(events, num_batches=1, ledger=ledger, record=recorder(told))
    first_batch(trainer, [WithdrawnBatch], "batch")
    trainer.fit()
    assert events[2:6] == ["backward", "backward", "discard", "batch closed"]
    assert len(ledger.checked) == 1  # not what was withdrawn
    assert_trained_once(trainer, events, reported, ledger, told)


def test_a_batch_of_which_everything_was_withdrawn_begins_again():
    """Its rejected groups are not there any more: nobody can say that nothing was accepted."""
    events, told = [], []
    ledger = FakeLedger(events)

    class Empty(WithdrawnBatch):
        def __init__(self, *parts):
            super().__init__(*parts)
            for stream in self.updates:
                stream.groups = []

    trainer, reported = make_trainer(events, num_batches=1, ledger=ledger, record=recorder(told))
    first_batch(trainer, [Empty], "batch")
    trainer.fit()
    assert_trained_once(trainer, events, reported, ledger, told)


def test_a_withdrawal_between_two_updates_ends_the_run_for_now():
    events, told = [], []
    trainer, reported = make_trainer(
        events, num_batches=2, updates_per_batch=2, record=recorder(told)
    )
    first_batch(trainer, [FakeStream, WithdrawnStream], "stream")
    with pytest.raises(InterruptedRun, match=f"{REASON}\n1 of 2 updates of the open batch") as e:
        trainer.fit()
    assert e.value.status == TEMPORARY_FAILURE == 75
    expected = ["backward", "step /6", "discard", "batch closed", "share withdrawals"]
    assert events[-5:] == expected
    assert "save" not in events and "certify 0" not in events
    assert trainer.progress == Progress(0, 0, 0, 0, "weights 0", 0)
    assert [each["event"] for each in told][-2:] == ["batch_withdrawn", "interrupted"]
    assert [step for step, _ in reported] == [0]


def test_a_withdrawal_behind_the_only_step_ends_the_run_for_now():
    """The weights are made by what was taken back: they must not be certified."""
    events = []

    class Engine(FakeEngine):
        def optimizer_step(self, denominator, value_denominator=0.0):
            batch.withdrawn = REASON
            return super().optimizer_step(denominator, value_denominator)

    class Batch(FakeBatch):
        def __init__(self, *parts):
            nonlocal batch
            super().__init__(*parts)
            batch = self

    batch = None
    trainer, _ = make_trainer(events, engine=Engine(events))
    first_batch(trainer, [Batch], "batch")
    with pytest.raises(InterruptedRun, match="1 of 1 updates") as raised:
        trainer.fit()
    assert raised.value.status == TEMPORARY_FAILURE
    assert "save" not in events and "certify 0" not in events


def test_an_outage_of_a_batch_that_has_begun_again_saves():
    events = []
    trainer, _ = make_trainer(events)

    class Gone(FakeStream):
        def drain_ready(self, max_tokens, idle=None):
            raise FakeOutage("all endpoints are gone")

    first_batch(trainer, [WithdrawnStream, Gone], "stream")
    with pytest.raises(InterruptedRun, match="(?s)are gone.*step 0 is saved"):
        trainer.fit()
    assert events[-3:] == ["discard", "batch closed", "save"]


# ---- several ranks -------------------------------------------------------------------------------


class Threads:
    """Values that the threads of ranks exchange."""

    def __init__(self, num_ranks):
        self.values = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=20)


class ThreadCollectives(Collectives):
    """A rank that is a thread."""

    def __init__(self, rank, threads):
        super().__init__(Ranks.data_parallel())
        self.ranks = Ranks.data_parallel(rank, len(threads.values))
        self.threads = threads

    def all_gather(self, value):
        self.threads.values[self.ranks.rank] = value
        self.threads.barrier.wait()
        values = list(self.threads.values)
        self.threads.barrier.wait()
        return values


class OneOfTwo(FakeRollouts):
    """Every other group of the batch is this rank's."""

    rank = 0

    def begin(self, served, position, excluded=()):
        batch = super().begin(served, position)
        for stream in batch.updates:
            stream.groups = [g for g in stream.groups if g.position % 2 == self.rank]
        batch.refused = [g for g in batch.refused if g.position % 2 == self.rank]
        return batch


def two_ranks(prepare=lambda rank, trainer: None, **options):
    """Both ranks' events, ledgers and errors."""
    threads = Threads(2)
    results = [([], FakeLedger([])) for _ in range(2)]

    def run(rank):
        events, ledger = results[rank]
        trainer, _ = make_trainer(
            events, collectives=ThreadCollectives(rank, threads), ledger=ledger, **options
        )
        trainer.rollouts.__class__ = OneOfTwo
        trainer.rollouts.rank = rank
        prepare(rank, trainer)
        try:
            trainer.fit()
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(run, range(2)))
    return [(*result, error) for result, error in zip(results, errors, strict=True)]


def test_peaks_of_memory_are_those_of_the_rank_with_most_in_each_phase():
    """A rank may have no phase that another has."""

    class Peaks:
        def __init__(self, **peaks):
            self.peaks = peaks

        def take(self):
            return self.peaks

    trainers = {}

    def prepare(rank, trainer):
        trainers[rank] = trainer
        trainer.memory = Peaks(train=1.0 + rank, look_ahead=3.0) if rank else Peaks(train=5.0)
        trainer.max_steps = 1
        trainer._report = lambda published, figures=None: None  # what it would tell stays

    for _, _, error in two_ranks(prepare, num_batches=1):
        assert error is None
    for trainer in trainers.values():
        told = trainer.progress.unreported
        assert (told["train"], told["look_ahead"]) == (5.0, 3.0)


def test_the_account_is_of_all_ranks():
    make = refusing(rejected={0: "flat", 1: "flat"})
    ranks = two_ranks(num_batches=2, make=make)
    for events, ledger, error in ranks:
        assert error is None and events.count("backward") == 1
        [account] = ledger.closed
        assert [(g.index, g.rank, g.outcome) for g in account.groups] == [
            (0, 0, "rejected"),
            (1, 1, "rejected"),
            (2, 0, "trained"),
            (3, 1, "trained"),
        ]
        assert account.num_ranks == 2


@pytest.mark.parametrize(
    "kind, attribute", [(WithdrawnStream, "stream"), (WithdrawnBatch, "batch")]
)
def test_a_batch_that_is_withdrawn_on_one_rank_begins_again_on_all(kind, attribute):
    def prepare(rank, trainer):
        if rank == 1:
            first_batch(trainer, [kind], attribute)

    for events, ledger, error in two_ranks(prepare, num_batches=1):
        assert error is None
        assert events.count("begin [0, 1] run:0:0") == 2 and events.count("discard") == 1
        assert [event for event in events if event.startswith("step")] == ["step /12"]
        [account] = ledger.closed
        assert [group.key for group in account.groups] == [(0, 0), (0, 1)]


def test_a_withdrawal_on_one_rank_behind_a_step_ends_the_run_on_all():
    def prepare(rank, trainer):
        if rank == 1:
            first_batch(trainer, [FakeStream, WithdrawnStream], "stream")

    ranks = two_ranks(prepare, num_prompts=6, updates_per_batch=2)
    for events, ledger, error in ranks:
        assert isinstance(error, InterruptedRun) and error.status == TEMPORARY_FAILURE
        assert REASON in str(error) and "save" not in events and ledger.closed == []


# ---- epochs and the last step --------------------------------------------------------------------


def test_max_steps_runs_through_several_epochs():
    ledger = FakeLedger([])
    trainer, reported = make_trainer([], num_prompts=3, epochs=None, max_steps=4, ledger=ledger)
    trainer.fit()
    keys = [[group.key for group in account.groups] for account in ledger.closed]
    assert keys == [
        [(0, 0), (0, 1)],
        [(0, 2), (1, 0)],
        [(1, 1), (1, 2)],
        [(2, 0), (2, 1)],
    ]
    assert {account.ended_by for account in ledger.closed} == {"accepted"}
    assert trainer.progress.step == 4 and [step for step, _ in reported] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"num_batches": 2}, [(0, False), (1, False), (2, True)]),
        ({"num_prompts": 3}, [(0, False), (1, False), (2, True)]),
        ({"num_batches": 5, "max_steps": 1}, [(0, False), (1, True)]),
        ({"num_batches": 2, "updates_per_batch": 2}, [(0, False), (2, False), (4, True)]),
        ({"num_prompts": 3, "epochs": None, "max_steps": 2}, [(0, False), (1, False), (2, True)]),
    ],
)
def test_the_last_report_is_told_to_be_the_last_exactly_once(options, expected):
    evaluation = FakeEvaluation()
    trainer, _ = make_trainer([], evaluation=evaluation, **options)
    trainer.fit()
    assert evaluation.asked == expected


def test_a_batch_that_takes_the_rest_of_the_order_is_the_last():
    """Its refused groups have used up what the next one would have had."""
    evaluation = FakeEvaluation()
    make = refusing(rejected={0: "flat", 1: "flat"})
    trainer, _ = make_trainer([], num_prompts=4, make=make, evaluation=evaluation)
    trainer.fit()
    assert evaluation.asked == [(0, False), (1, True)]


def test_a_run_that_is_interrupted_before_its_last_report_makes_it_when_it_is_resumed():
    class Gone(FakeSync):
        def publish(self, version, meanwhile, *, canary_follows):
            if version.v == 1:
                raise FakeOutage("all endpoints are gone")
            return super().publish(version, meanwhile)

    first, again, third = FakeEvaluation(), FakeEvaluation(), FakeEvaluation()
    trainer, _ = make_trainer([], num_batches=1, weight_sync=Gone([]), evaluation=first)
    with pytest.raises(InterruptedRun):
        trainer.fit()
    resumed, _ = make_trainer([], num_batches=1, progress=trainer.progress, evaluation=again)
    resumed.fit()
    assert first.asked == [(0, False)] and again.asked == [(1, True)]
    complete, reported = make_trainer(
        [], num_batches=1, progress=resumed.progress, evaluation=third
    )
    complete.fit()
    assert third.asked == [] and reported == []
