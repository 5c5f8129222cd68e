"""What a run says of its time at the end: advice where there is inference, a trace in any case."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from easyrl.build import timeline as build
from easyrl.build.timeline import _end
from easyrl.simulation import advice as simulation
from easyrl.timeline.folder import TimelineFolder
from tests.easyrl.timeline.made_spans import TRAINER, batch


def config_of(source: str) -> SimpleNamespace:
    return SimpleNamespace(
        source=source,
        run=SimpleNamespace(mode="async"),
        parallel=SimpleNamespace(ranks_per_model=1),
    )


@pytest.mark.parametrize(("source", "advises"), [("rollouts", True), ("records", False)])
def test_a_run_on_records_has_nothing_to_compare_training_with(
    tmp_path, capsys, source, advises
) -> None:
    folder = TimelineFolder(tmp_path)
    folder.write(batch(TRAINER, 10.0))
    _end(folder, None, config_of(source))
    assert (tmp_path / "trace.json").exists()
    assert ("easyrl trace" in capsys.readouterr().err) is advises


def test_what_fails_in_the_advice_is_logged_and_does_not_end_the_run(
    tmp_path, capsys, caplog, monkeypatch
) -> None:
    def fail(batches, config):
        raise ZeroDivisionError("a batch of no time")

    monkeypatch.setattr(build, "advice_of_run", fail)
    folder = TimelineFolder(tmp_path)
    folder.write(batch(TRAINER, 10.0))
    _end(folder, None, config_of("rollouts"))
    assert (tmp_path / "trace.json").exists() and "easyrl:" not in capsys.readouterr().err
    assert "there is no advice" in caplog.text and "a batch of no time" in caplog.text


def test_advice_is_of_batches_that_are_kept_whole(tmp_path, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        simulation, "advice", lambda batches, **_: asked.append([b.batch for b in batches])
    )
    folder = TimelineFolder(tmp_path)
    for number in range(3):
        spans = batch(TRAINER, 10.0, number)
        folder.write(msgspec.structs.replace(spans, left_out=5 * (number == 1)))
    _end(folder, None, config_of("rollouts"))
    assert asked == [[0, 2]]
