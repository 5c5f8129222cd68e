"""Samples of the loop: written when their batch counts, and of nothing that was withdrawn."""

from dataclasses import replace

import pytest

from easyrl.engines.base import ResponseDifference
from easyrl.samples.folder import SampleFolder
from easyrl.samples.writer import SampleWriter
from easyrl.schema import InterruptedRun, Progress, SampleKey
from tests.easyrl.trainer.fake_parts import (
    FakeBatch,
    FakeEngine,
    FakeLedger,
    FakeRollouts,
    OutageStream,
    group,
    make_trainer,
)


def trainer_of(folder, events=None, **plan):
    trainer, reported = make_trainer([] if events is None else events, samples_per_step=2, **plan)
    trainer.samples = SampleWriter(folder, keep=99)
    return trainer, reported


def kept(folder):
    return {step: [each.index for each in folder.read(step)] for step in folder.steps()}


def test_each_step_has_its_groups_and_the_seconds_are_a_metric(tmp_path):
    folder = SampleFolder(tmp_path)
    trainer, reported = trainer_of(folder)
    trainer.fit()
    assert kept(folder) == {1: [0, 1], 2: [2, 3]}
    assert [step for step, metrics in reported if metrics.get("time/samples_s", 0) > 0] == [1, 2]
    first = folder.read(1)[0]
    assert [r.reward for r in first.responses] == [0.0, 1.0]
    worse, better = (r.advantage for r in first.responses)
    assert worse == -better < 0  # what the recipe has made of the rewards
    assert first.version == "run:0:0" and not first.skipped


def test_updates_of_one_batch_are_steps_of_their_own(tmp_path):
    folder = SampleFolder(tmp_path)
    trainer, _ = trainer_of(folder, updates_per_batch=2)
    trainer.fit()
    assert kept(folder) == {1: [0], 2: [1], 3: [2], 4: [3]}


def test_without_them_nothing_is_written_and_no_metric_is_there(tmp_path):
    trainer, reported = make_trainer([])
    trainer.fit()
    assert not any("time/samples_s" in metrics for _, metrics in reported)


def test_the_difference_of_log_probabilities_is_that_of_the_response(tmp_path):
    class Compares(FakeEngine):
        def forward_backward(self, micro_batches):
            (sums,) = super().forward_backward(micro_batches)
            for row in micro_batches:
                for key in row.sequences:
                    d = 0.5 if key.sample else -0.25
                    sums.responses.append(ResponseDifference(SampleKey(*key), 2.0, d))
            return [sums]

    folder = SampleFolder(tmp_path)
    trainer, _ = trainer_of(folder, engine=Compares([]))
    trainer.fit()
    responses = folder.read(2)[1].responses
    assert [response.logprob_diff for response in responses] == [-0.125, 0.25]


def test_a_batch_is_in_the_certificate_before_its_samples_are_there(tmp_path):
    folder = SampleFolder(tmp_path)
    seen = []

    class Looks(FakeLedger):
        def close_batch(self, account):
            seen.append(folder.steps())
            super().close_batch(account)

    trainer, _ = trainer_of(folder, ledger=Looks([]))
    trainer.fit()
    assert seen == [[], [1]]


def test_a_batch_that_never_counts_leaves_none(tmp_path):
    folder = SampleFolder(tmp_path)

    class FullDisk(FakeLedger):
        def close_batch(self, account):
            raise OSError("no space left on device")

    trainer, _ = trainer_of(folder, ledger=FullDisk([]))
    with pytest.raises(OSError, match="no space"):
        trainer.fit()
    assert folder.steps() == []


def test_withdrawn_groups_are_not_among_them(tmp_path, monkeypatch):
    """The batch is handed out, withdrawn, and made again with other responses."""
    events, made = [], []

    class Withdrawn(FakeBatch):
        @property
        def withdrawn(self):
            return "http://fake:1 failed its proof" if len(made) <= 2 else None

        @withdrawn.setter
        def withdrawn(self, value):
            pass

    def make(index, version):
        made.append(index)
        ours = group(index, version)
        if len(made) <= 2:
            return ours
        tokens = [replace(c, token_ids=c.token_ids + 50) for c in ours.completions]
        return replace(ours, completions=tuple(tokens))

    monkeypatch.setattr(FakeRollouts, "batch", Withdrawn)
    folder = SampleFolder(tmp_path)
    trainer, _ = trainer_of(folder, events, num_batches=1, make=make)
    trainer.fit()
    assert "share withdrawals" in events
    assert kept(folder) == {1: [0, 1]}
    tokens = {tuple(r.token_ids) for each in folder.read(1) for r in each.responses}
    assert tokens == {(50, 51, 52)}


def test_a_resumed_run_has_each_step_once(tmp_path):
    folder = SampleFolder(tmp_path)
    trainer, _ = trainer_of(folder, num_batches=3)
    trainer.fit()
    assert kept(folder) == {1: [0, 1], 2: [2, 3], 3: [4, 5]}
    folder.remove_after(1)  # as ``open_samples`` does
    progress = Progress(1, 1, 0, 2, reported_step=1)
    trainer, _ = trainer_of(folder, num_batches=3, progress=progress)
    trainer.fit()
    assert kept(folder) == {1: [0, 1], 2: [2, 3], 3: [4, 5]}


def test_an_outage_in_mid_batch_leaves_those_of_closed_batches(tmp_path, monkeypatch):
    folder = SampleFolder(tmp_path)
    trainer, _ = trainer_of(folder)
    begin = FakeRollouts.begin

    def second_fails(self, served, position, excluded=()):
        self.stream = OutageStream if position else FakeRollouts.stream
        return begin(self, served, position, excluded)

    monkeypatch.setattr(FakeRollouts, "begin", second_fails)
    with pytest.raises(InterruptedRun, match="all endpoints are gone"):
        trainer.fit()
    assert kept(folder) == {1: [0, 1]}
