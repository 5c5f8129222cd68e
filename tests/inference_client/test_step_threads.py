"""Decode steps with the server's half of the cores or with all, by which is faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from easyrl.inference_client.servers.embedded.step_threads import (
    NUM_TIMED,
    TIMED_AGAIN,
    StepThreads,
)
from easyrl.runtime.shared_cores import SUPPORTED, SharedCores, shared_file

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs locks of open files (Linux)")

HALF, ALL = 3, 6


class Steps:
    """Steps that take what ``seconds`` says for the number of threads that they have."""

    def __init__(self, cores: SharedCores, seconds: dict[int, float]) -> None:
        self._now_s, self.seconds = 0.0, seconds
        self.threads = StepThreads(cores, lambda: self._now_s)

    def run(self, number: int, work: int = 1000) -> list[int]:
        """Their numbers of threads."""
        had = []
        for _ in range(number):
            with self.threads.step(work):
                had.append(torch.get_num_threads())
                self._now_s += self.seconds[had[-1]]
        return had


@pytest.fixture
def cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedCores]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = torch.get_num_threads()
    with shared_file(tmp_path / "run") as file:
        cores = SharedCores(file, num_cores=ALL, most=0.5)
        # this machine's own load is no part of what is tested
        monkeypatch.setattr(cores._contention, "begin", lambda threads: threads)
        yield cores
        cores.close()
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("with_all_s", "chosen"), [(0.5, ALL), (0.89, ALL), (0.95, HALF), (2.0, HALF)]
)
def test_what_is_faster_is_chosen_and_the_other_tried_again(
    cores: SharedCores, with_all_s: float, chosen: int
) -> None:
    steps = Steps(cores, {HALF: 1.0, ALL: with_all_s})
    assert steps.run(2 * NUM_TIMED) == [HALF] * NUM_TIMED + [ALL] * NUM_TIMED
    num_left = TIMED_AGAIN - 2 * NUM_TIMED
    assert steps.run(num_left) == [chosen] * num_left
    (other,) = {HALF, ALL} - {chosen}
    assert steps.run(NUM_TIMED) == [other] * NUM_TIMED
    assert steps.run(NUM_TIMED) == [chosen] * NUM_TIMED


def test_a_choice_is_of_like_steps_and_changes_with_the_machine(cores: SharedCores) -> None:
    steps = Steps(cores, {HALF: 1.0, ALL: 0.5})
    assert steps.run(2 * NUM_TIMED + 1)[-1] == ALL
    steps.seconds = {HALF: 0.1, ALL: 0.2}
    assert steps.run(2 * NUM_TIMED + 1, work=10)[-1] == HALF
    assert steps.run(1, work=1020) == [ALL]
    steps.seconds = {HALF: 1.0, ALL: 3.0}  # somebody is in the way of several threads
    assert steps.run(NUM_TIMED)[-1] == HALF


def test_nothing_is_tried_beside_others_or_in_a_step_like_no_other(
    cores: SharedCores, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(cores, {HALF: 1.0, ALL: 0.5})
    assert steps.run(4 * NUM_TIMED, work=0) == [HALF] * 4 * NUM_TIMED
    with monkeypatch.context() as beside:
        beside.setattr(cores, "_count_others", lambda start, end: 1)
        assert steps.run(4 * NUM_TIMED) == [HALF] * 4 * NUM_TIMED
    assert steps.run(2 * NUM_TIMED) == [HALF] * NUM_TIMED + [ALL] * NUM_TIMED


def test_without_a_share_of_cores_threads_stay() -> None:
    before = torch.get_num_threads()
    steps = Steps(SharedCores(), {before: 1.0})
    assert set(steps.run(4 * NUM_TIMED)) == {before}
