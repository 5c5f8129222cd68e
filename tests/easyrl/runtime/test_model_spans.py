"""Forwards and backwards are told with their times, on a device that runs behind the host too."""

from __future__ import annotations

import time

import pytest
import torch

from easyrl.runtime.model_spans import ModelSpans
from tests.easyrl.runtime.test_device_time import Device, Event

Told = list[tuple[str, float, float]]


def test_on_a_cpu_a_span_is_told_as_it_ends() -> None:
    told: Told = []
    spans = ModelSpans.of(torch.device("cpu"))
    spans.on_span = lambda *span: told.append(span)
    began_after: list[int] = []
    spans.before = lambda: began_after.append(len(told))
    before_s = time.monotonic()
    with spans.span("policy forward"):
        assert began_after == [0]
        time.sleep(0.01)
    ((name, start_s, end_s),) = told
    assert name == "policy forward"
    assert before_s <= start_s <= end_s - 0.01 and end_s <= time.monotonic()
    spans.tell()
    assert len(told) == 1


def test_what_runs_behind_the_host_is_told_when_its_work_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, told = Device(), Told()
    monkeypatch.setattr(time, "monotonic", lambda: device.host_s)
    spans = ModelSpans(lambda: Event(device))
    spans.on_span = lambda *span: told.append(span)
    with spans.span("policy forward"):
        device.launch(2.0)
    device.host_s += 0.5  # host work, the device is still at the forward
    with spans.span("policy backward"):
        device.launch(4.0)
    assert told == [] and device.host_s < 1.0  # nothing was waited for
    spans.tell()
    assert told == [
        ("policy forward", pytest.approx(0.0), pytest.approx(2.0)),
        ("policy backward", pytest.approx(2.0), pytest.approx(6.0)),
    ]
    spans.tell()
    assert len(told) == 2


def test_without_a_listener_no_event_is_made() -> None:
    def no_event() -> Event:
        raise AssertionError("an event")

    spans = ModelSpans(no_event)
    with spans.span("policy forward"):
        pass
    spans.tell()
