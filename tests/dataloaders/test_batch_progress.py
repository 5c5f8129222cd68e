"""How far an open batch is, as a thread sees it that only looks."""

from __future__ import annotations

import threading

from easyrl.dataloaders.producer.batch_progress import BatchProgress
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.dataloaders.supervised.batches import RecordBatches
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import PolicyVersion, ServedWeights
from tests.dataloaders.rollout_parts import G, ScriptedGenerate
from tests.dataloaders.test_open_batch import begin, reject
from tests.waiting import wait_until


def test_groups_arrive_and_are_trained_row_by_row():
    generate = ScriptedGenerate(open_indices=range(3))
    with LoopThread() as thread:
        batch = begin(thread, generate, 4)
        wait_until(lambda: batch.progress.arrived == 3)
        assert batch.progress == BatchProgress(4, 3, 0)
        (stream,) = batch.updates
        drained = stream.drain_ready(10_000)  # of the same length each
        assert len(drained) == 3 and batch.progress.trained == 0
        tokens = sum(4 + G * 5 for _ in drained)
        stream.note_trained(tokens // 3 - 1)
        assert batch.progress.trained == 0
        stream.note_trained(1)
        assert batch.progress.trained == 1
        waiting = threading.Thread(target=stream.drain_ready, args=[10_000])
        waiting.start()
        wait_until(lambda: batch.progress.trained == 3)  # all of the drain before is trained
        assert batch.progress == BatchProgress(4, 3, 3)
        wait_until(lambda: 3 in generate.gates)
        generate.release(thread, 3)
        waiting.join()
        assert batch.progress == BatchProgress(4, 4, 3)
        assert stream.drain_ready(10_000) == []
        assert batch.progress == BatchProgress(4, 4, 4)


def test_a_refused_group_has_not_arrived_and_the_batch_is_as_large():
    with LoopThread() as thread:
        batch = begin(thread, ScriptedGenerate(range(5)), 4, accept=reject(1))
        wait_until(lambda: batch.membership.complete)
        assert batch.progress == BatchProgress(4, 4, 0)


def test_a_batch_is_no_larger_than_the_prompts_that_are_left():
    membership = BatchMembership(4, num_left=3)
    membership.decide(0, accepted=False)
    assert BatchProgress.of(membership, []) == BatchProgress(2, 0, 0)


def test_records_are_there_from_the_start():
    served = ServedWeights(PolicyVersion("r", 0, 0), "")
    batches = RecordBatches([], order=NoPrompts(), batch_size=4)
    assert batches.progress is None
    batches.begin(served, 0)
    assert batches.progress == BatchProgress(0, 0, 0) and batches.num_waiting == 0


class NoPrompts:
    """An order that has come to its end."""

    def num_left(self, position: int) -> int:
        return 0
