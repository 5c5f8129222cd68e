"""Producer and journal together, over attempts that end in the middle of a batch."""

import asyncio

from easyrl.ledger.journal import JournalledRollouts
from easyrl.runtime.loop_thread import LoopThread
from tests.dataloaders.rollout_parts import G, ScriptedGenerate, generator, prompt
from tests.easyrl.ledger.journal_groups import OTHER_WEIGHTS, journal, read, served
from tests.waiting import wait_until

PROMPTS = [prompt(index) for index in range(4)]


def take(stream) -> dict[int, tuple[str, str]]:
    """Index → version and digest."""
    groups = iter(lambda: stream.drain_ready(50), [])
    return {g.prompt.index: (g.policy_version, g.digest) for ready in groups for g in ready}


def attempt(thread, directory, number, generate, queue_size=64) -> JournalledRollouts:
    return JournalledRollouts(
        generator(thread, generate, queue_size=queue_size), journal(directory, attempt=number)
    )


def test_each_attempt_asks_only_for_what_is_missing(tmp_path):
    first, second = ScriptedGenerate(open_indices=[0, 3]), ScriptedGenerate(open_indices=range(4))
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 0, first)
        rollouts.produce(PROMPTS, served(0))
        wait_until(lambda: rollouts.num_waiting == 2)
    # killed: nothing was taken, closed or synced; another process, another loop
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 1, second, queue_size=1)
        slices = [
            rollouts.produce(PROMPTS[:2], served(1)),
            rollouts.produce(PROMPTS[2:], served(1), priority=1),
        ]
        assert [stream.recovered for stream in slices] == [{(0, 0)}, {(0, 3)}]
        assert all(s.accepted_versions == {"run:0:3", "run:1:3"} for s in slices)
        taken = take(slices[0]) | take(slices[1])
        rollouts.sync()
        rollouts.close()
    assert {index: version for index, (version, _) in taken.items()} == {
        0: "run:0:3", 1: "run:1:3", 2: "run:1:3", 3: "run:0:3",
    }  # fmt: skip
    assert {index for index, _ in second.asked} == {1, 2}
    journalled = {record.key[1]: (record.version, record.digest) for record in read(tmp_path)}
    assert journalled == taken  # each of them once


def test_groups_of_other_weights_are_named_to_the_stream_that_makes_them_again(tmp_path):
    with LoopThread() as thread:
        generate = ScriptedGenerate(open_indices=range(4))
        attempt(thread, tmp_path, 0, generate).produce(PROMPTS, served(0)).complete()
        rollouts = attempt(thread, tmp_path, 1, generate)
        weights = served(1, digest=OTHER_WEIGHTS)
        streams = [rollouts.produce(PROMPTS[:1], weights), rollouts.produce(PROMPTS[1:], weights)]
        assert [sorted(s.discarded) for s in streams] == [[(0, 0)], [(0, 1), (0, 2), (0, 3)]]
        assert [s.num_recovered for s in streams] == [0, 0]
        for stream in streams:
            stream.complete()
    assert len(generate.asked) == 2 * 4 * G


def test_the_next_batch_has_a_journal_of_its_own(tmp_path):
    generate = ScriptedGenerate(open_indices=range(4))
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 0, generate)
        rollouts.produce(PROMPTS[:2], served(0, v=3)).complete()
        rollouts.produce(PROMPTS[:2], served(0, v=4)).complete()
        rollouts.close()
        rollouts.close()
    folders = sorted(path.parent.name for path in tmp_path.rglob("*.journal"))
    assert folders == ["batch-000003", "batch-000004"]
    assert len(read(tmp_path)) == 2


def test_a_batch_that_is_given_up_keeps_what_was_finished(tmp_path):
    generate = ScriptedGenerate(open_indices=[0])
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 0, generate)
        stream = rollouts.produce(PROMPTS, served(0))
        wait_until(lambda: stream.waiting == 1)
        stream.close()
        rollouts.close()
        thread.run(asyncio.sleep(0))
    assert [record.key for record in read(tmp_path)] == [(0, 0)]
