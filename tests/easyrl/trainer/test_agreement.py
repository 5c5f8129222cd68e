"""An endpoint whose log-probabilities are not the trainer's: nothing of it is trained."""

from dataclasses import replace

import pytest

from easyrl.engines.base import LogprobComparison, MetricSums
from easyrl.schema import TEMPORARY_FAILURE, EndpointAgreement, InterruptedRun
from tests.easyrl.trainer.fake_parts import FakeEngine, FakeLedger, group, make_trainer
from tests.easyrl.trainer.test_batch_membership import two_ranks

GOOD, BAD = "http://good:1", "http://bad:1"
SHIFT = 30.0  # nats, so that the 6 tokens of a group are enough


def made_by(*urls):
    """A ``make``: each prompt's group by the endpoint in its place."""

    def make(index, version):
        made = group(index, version)
        url = urls[index % len(urls)]
        return replace(made, completions=tuple(replace(c, endpoint=url) for c in made.completions))

    return make


class ComparingEngine(FakeEngine):
    """Differs from the endpoint ``BAD`` by ``shift`` nats on every token."""

    def __init__(self, events, shift=SHIFT, results=()):
        super().__init__(events, results)
        self.shift = shift

    def forward_backward(self, micro_batches):
        [metrics] = super().forward_backward(micro_batches)
        for row in micro_batches:
            for token in row.sequence_index.tolist():
                d = self.shift if row.endpoints[token] == BAD else 1e-3
                one = LogprobComparison(num=1.0, abs=d, maximum=d)
                metrics.add(MetricSums(compared={row.endpoints[token]: one}))
        return [metrics]


def judging(events, make, *, limit=0.2, **parts):
    """A trainer that judges, and its ledger; withdrawn endpoints' groups are made by others."""
    engine = parts.pop("engine", None) or ComparingEngine(events)
    ledger = FakeLedger(events)
    trainer, reported = make_trainer(events, make=make, engine=engine, ledger=ledger, **parts)
    trainer.accumulator = replace(trainer.accumulator, agreement_limit=limit)
    rollouts = trainer.rollouts

    def withdraw(problems):
        rollouts.told = problems
        events.append(f"withdraw {sorted(problems)}")
        rollouts.make = made_by(GOOD)

    rollouts.withdraw_endpoints = withdraw
    return trainer, ledger, reported


def test_the_batch_begins_again_without_the_endpoint_as_soon_as_it_is_sure():
    """After the row that shows it: the groups behind it are not run before."""
    events = []
    trainer, ledger, _ = judging(events, made_by(BAD, GOOD), num_batches=1)
    trainer.fit()
    assert events[1:6] == [
        "begin [0, 1] run:0:0", "backward", f"withdraw ['{BAD}']", "discard", "batch closed",
    ]  # fmt: skip
    problem = trainer.rollouts.told[BAD]
    assert "30 nats" in problem and "6 trained tokens" in problem
    assert [event for event in events if event.startswith("step")] == ["step /12"]
    [account] = ledger.closed
    assert [g.endpoints for g in account.groups] == [[GOOD], [GOOD]]
    assert account.agreement == [EndpointAgreement(GOOD, 12, pytest.approx(1e-3), 1e-3)]


def test_it_is_asked_again_behind_the_last_row():
    events = []
    trainer, ledger, _ = judging(events, made_by(GOOD, BAD), num_batches=1)
    trainer.fit()
    assert events[2:5] == ["backward", "backward", f"withdraw ['{BAD}']"]
    assert [event for event in events if event.startswith("step")] == ["step /12"]


@pytest.mark.parametrize("limit, shift", [(None, SHIFT), (0.2, 1.0)], ids=["off", "few tokens"])
def test_what_is_within_the_limit_or_not_judged_is_written_down(limit, shift):
    events = []
    trainer, ledger, _ = judging(
        events,
        made_by(GOOD, BAD),
        num_batches=1,
        limit=limit,
        engine=ComparingEngine(events, shift),
    )
    trainer.fit()
    [account] = ledger.closed
    assert account.agreement == [
        EndpointAgreement(BAD, 6, shift, shift),
        EndpointAgreement(GOOD, 6, pytest.approx(1e-3), 1e-3),
    ]
    assert not any(event.startswith("withdraw") for event in events)


def test_sums_go_on_from_update_to_update_and_behind_a_step_the_run_ends_for_now():
    """4 nats on 6 tokens say too little, on the batch's 12 enough; the first update was taken."""
    events = []
    trainer, ledger, _ = judging(
        events, made_by(BAD), updates_per_batch=2, engine=ComparingEngine(events, 4.0)
    )
    with pytest.raises(InterruptedRun, match=f"(?s){BAD} log-prob.*12 trained.*1 of 2 up") as e:
        trainer.fit()
    assert e.value.status == TEMPORARY_FAILURE
    steps = [event for event in events if event.startswith("step")]
    assert steps == ["step /6"] and not ledger.closed and "save" not in events


def test_ranks_judge_together_what_is_too_little_on_each():
    """4 nats on 6 tokens of each rank: the mean of both is over the limit, before any step."""

    def prepare(rank, trainer):
        events = trainer.accumulator.engine.events
        engine = ComparingEngine(events, 4.0)
        trainer.accumulator = replace(trainer.accumulator, agreement_limit=0.2, engine=engine)
        trainer._engine = engine
        rollouts = trainer.rollouts
        rollouts.make = made_by(BAD)

        def withdraw(problems):
            events.append(f"withdraw {sorted(problems)}")
            rollouts.make = made_by(GOOD)

        rollouts.withdraw_endpoints = withdraw

    for events, ledger, error in two_ranks(prepare, num_batches=1):
        assert error is None
        assert events[1:6] == [
            "begin [0, 1] run:0:0", "backward", f"withdraw ['{BAD}']", "discard", "batch closed",
        ]  # fmt: skip
        assert sum(event.startswith("step") for event in events) == 1
        [account] = ledger.closed
        assert [seen.url for seen in account.agreement] == [GOOD]


def test_one_rank_that_is_sure_ends_the_batch_on_all():
    def prepare(rank, trainer):
        events = trainer.accumulator.engine.events
        engine = ComparingEngine(events, SHIFT if rank == 1 else 0.0)
        trainer.accumulator = replace(trainer.accumulator, agreement_limit=0.2, engine=engine)
        trainer._engine = engine
        trainer.rollouts.make = made_by(BAD)
        trainer.rollouts.withdraw_endpoints = lambda problems: events.append("withdraw")
        share = trainer.rollouts.share_withdrawals

        def share_withdrawals():
            trainer.rollouts.make = made_by(GOOD)
            share()

        trainer.rollouts.share_withdrawals = share_withdrawals

    (first, *_), (second, *_) = two_ranks(prepare, num_batches=1)
    assert "withdraw" in second and "withdraw" not in first
    for events in (first, second):
        assert events.count("discard") == 1 and events.count("begin [0, 1] run:0:0") == 2
        assert sum(event.startswith("step") for event in events) == 1
