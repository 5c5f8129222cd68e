"""Time spans on a device that runs behind the host, played on a clock of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.engines.base import MetricSums
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.device_time import DeviceTimer
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import TrainedGroup
from easyrl.trainer import accumulation
from easyrl.trainer.accumulation import Accumulator, GroupFunctions
from tests.easyrl.trainer.fake_parts import FakeEngine
from tests.tiny_models import random_group


class Device:
    """Runs what is launched in order; a launch takes the host no time."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self.busy_until_s = 0.0

    def launch(self, seconds: float) -> None:
        self.busy_until_s = max(self.busy_until_s, self.host_s) + seconds

    def wait_until(self, time_s: float) -> None:
        self.host_s = max(self.host_s, time_s)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.happens_s = float("nan")

    def record(self) -> None:
        self.happens_s = max(self._device.host_s, self._device.busy_until_s)

    def synchronize(self) -> None:
        self._device.wait_until(self.happens_s)

    def elapsed_time(self, end: Event) -> float:
        assert end.happens_s <= self._device.host_s, "not done yet"
        return 1000 * (end.happens_s - self.happens_s)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def timer(device: Device) -> DeviceTimer:
    return DeviceTimer(lambda: Event(device))


def test_a_span_is_the_work_and_not_its_launch(device: Device, timer: DeviceTimer) -> None:
    with timer.span():
        device.launch(2.0)
    assert device.host_s == 0.0  # nothing was waited for
    assert timer.total_s() == pytest.approx(2.0)
    assert device.host_s == 2.0


def test_spans_behind_each_other_do_not_overlap(device: Device, timer: DeviceTimer) -> None:
    """The second begins when the first one's work is done, not when it is launched."""
    for _ in range(3):
        with timer.span():
            device.launch(1.0)
    assert timer.total_s() == pytest.approx(3.0)


def test_an_idle_device_between_spans_does_not_count(device: Device, timer: DeviceTimer) -> None:
    with timer.span():
        device.launch(1.0)
    device.host_s = 10.0  # waited for groups
    with timer.span():
        device.launch(1.0)
        device.host_s += 0.5  # the host's own part, behind which the device waits
        device.launch(1.0)
    assert timer.total_s() == pytest.approx(3.0)
    with timer.span():
        device.launch(1.0)
    assert timer.total_s() == pytest.approx(4.0)  # all so far


def test_waiting_ends_with_the_last_span(device: Device, timer: DeviceTimer) -> None:
    timer.wait()
    with timer.span():
        device.launch(1.5)
    timer.wait()
    assert device.host_s == 1.5


def test_on_a_cpu_the_hosts_clock_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.5])
    monkeypatch.setattr("easyrl.runtime.device_time.time.monotonic", lambda: next(times))
    timer = DeviceTimer.of(torch.device("cpu"))
    with timer.span():
        pass
    assert not timer.runs_behind and timer.total_s() == 2.5


class Groups:
    """Two drains; the trainer waits for the second."""

    wait_s = load_s = 0.0
    first_group_wait_s = None
    accepted_versions, recovered = frozenset({"run:0:0"}), frozenset()

    def __init__(self, device: Device) -> None:
        self._device = device
        rng = np.random.default_rng(0)
        self._drains = [[random_group(rng, 3, [2, 2], index=i)] for i in range(2)] + [[]]

    def note_trained(self, num_tokens): ...

    def drain_ready(self, max_tokens, idle=None):
        ready = self._drains.pop(0)
        if len(self._drains) == 1:  # the second comes 10 s after it is waited for
            assert idle is not None and not idle()
            self._device.host_s += 10.0
            self.wait_s += 10.0
        return ready

    def interrupt(self, error):
        raise error


class BehindEngine(FakeEngine):
    """Launches three seconds of work for each row."""

    def __init__(self, device: Device) -> None:
        super().__init__([])
        self._device = device

    def forward_backward(self, micro_batches):
        self._device.launch(3.0)
        return [MetricSums({"num_loss_tokens": 1.0})]


def test_training_and_waiting_add_up_to_the_wall_time(
    device: Device, timer: DeviceTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward that runs on while groups are waited for is training, and not waiting too."""
    monkeypatch.setattr(accumulation.DeviceTimer, "of", lambda _: timer)
    row = dummy_micro_batch()
    collectives = Collectives(Ranks.data_parallel())
    accumulator = Accumulator(
        engine=BehindEngine(device),
        collectives=collectives,
        functions=GroupFunctions(
            trained=lambda groups, rewards, said: [TrainedGroup(group, ()) for group in groups],
            denominator=lambda groups: 1.0,
            pack=lambda trained, min_rows=1: [row for _ in trained],
            pack_finished=lambda groups: [],
            dummy=lambda: row,
        ),
        stop=StopRequest(grace_s=60.0),
        is_interruption=lambda error: False,
        record=lambda event, **fields: None,
        max_tokens=100,
        synchronous=False,
    )
    groups = Groups(device)
    totals = accumulator.accumulate(groups)
    assert totals.train_s == pytest.approx(6.0)
    assert totals.wait_s == 10.0
    assert device.host_s == pytest.approx(totals.train_s + totals.wait_s)
