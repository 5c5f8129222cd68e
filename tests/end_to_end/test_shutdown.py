"""SIGTERM in the middle of a batch saves and ends well; nothing that ends a run leaves a trace."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.end_to_end.held_batch import BATCH, NUM_GENERATIONS, HeldBatch
from tests.end_to_end.trainer_run import run_trainer

pytestmark = pytest.mark.runs


@pytest.fixture
def held(served, tmp_path) -> Iterator[HeldBatch]:
    batch = HeldBatch(tmp_path, served.model, served.url)
    yield batch
    batch.close()


def test_sigterm_saves_and_ends_well_and_resume_goes_on_from_the_open_batch(held):
    run = held.start()
    assert len(run.pids()) >= 2  # the trainer and at least one worker
    while run.process.poll() is None:  # a launcher and a scheduler may both send it
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    assert run.wait() == 0, held.log.read_text()[-5000:]
    log = held.log.read_text()
    assert "stopping (SIGTERM)" in log and "step 1 is saved; go on with --resume" in log
    assert held.checkpoints() == ["step-1"]
    assert not held.weights_left()

    held.proxy.open_gate()
    run_trainer([*held.command(), "--resume"])
    assert held.trainings() == {index: 1 for index in range(2 * BATCH)}
    # what was finished before the stop was not asked for again
    assert len(held.events("response_scored")) == 2 * BATCH * NUM_GENERATIONS


def test_ctrl_c_ends_at_once_without_a_checkpoint(held):
    run = held.start()
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
    assert run.wait(30) == 128 + signal.SIGINT, held.log.read_text()[-5000:]
    assert held.checkpoints() == []
    assert not held.weights_left()


def test_a_save_that_takes_longer_than_the_grace_ends_with_all_stacks(held):
    run = held.start("trainer.grace_s=0.001")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(30) == 1, held.log.read_text()[-5000:]
    log = held.log.read_text()
    assert "trainer.grace_s" in log
    assert "thread MainThread" in log and "thread easyrl-producer" in log


def test_the_watchdog_ends_a_run_whose_endpoint_answers_no_more(held):
    run = held.start("watchdog.window_s=5")
    assert run.wait(60) == 70, held.log.read_text()[-5000:]
    log = held.log.read_text()
    assert "the watchdog ends the run: 0 tokens/s in 5 s" in log
    assert "0 finished groups wait for the trainer" in log and held.proxy.url in log
    assert "thread MainThread" in log and "drain_ready" in log
    assert "asyncio tasks" in log and "RolloutGenerator" in log
    assert not held.weights_left()


def test_sigterm_to_one_rank_stops_all(held):
    """In lock-step, where a rank that stopped alone would leave the other in a collective."""
    run = held.start("trainer.zero_stage=2", num_ranks=2)
    (second,) = run.pids("--local_rank=1")
    os.kill(second, signal.SIGTERM)
    assert run.wait() == 0, held.log.read_text()[-5000:]  # the deepspeed command's own
    assert held.log.read_text().count("step 1 is saved") == 2
    assert "rank 1: SIGTERM" in held.log.read_text()
    assert held.checkpoints() == ["step-1"]
    assert not held.weights_left()


def test_sigterm_to_the_deepspeed_command_alone(held):
    """It ends by it and passes nothing on; what it started notices."""
    run = held.start(num_ranks=1)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == -signal.SIGTERM
    assert "the deepspeed command that started this run has ended" in held.log.read_text()
    assert held.checkpoints() == ["step-1"]
    assert not held.weights_left()


@pytest.mark.slow
def test_sigterm_to_every_process_of_a_job(held):
    """As ``scancel`` does. DeepSpeed's launcher also sends it to all workers below its ranks."""
    run = held.start("trainer.zero_stage=2", num_ranks=2)
    for pid in run.pids():
        os.kill(pid, signal.SIGTERM)
    run.wait()
    assert held.log.read_text().count("step 1 is saved") == 2, held.log.read_text()[-5000:]
    assert held.checkpoints() == ["step-1"]
    assert not held.weights_left()


@pytest.mark.slow
def test_ctrl_c_with_two_ranks(held):
    run = held.start(num_ranks=2)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait(30) != 0
    assert held.checkpoints() == []
    assert not held.weights_left()
