"""What a run says of its time at the end: advice where there is inference, a trace in any case."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from easyrl.build.timeline import _end
from easyrl.timeline.folder import TimelineFolder
from tests.easyrl.timeline.made_spans import TRAINER, batch


@pytest.mark.parametrize(("source", "advises"), [("rollouts", True), ("records", False)])
def test_a_run_on_records_has_nothing_to_compare_training_with(
    tmp_path, capsys, source, advises
) -> None:
    folder = TimelineFolder(tmp_path)
    folder.write(batch(TRAINER, 10.0))
    config = SimpleNamespace(source=source, run=SimpleNamespace(mode="async"))
    _end(folder, None, config)
    assert (tmp_path / "trace.json").exists()
    assert ("easyrl trace" in capsys.readouterr().err) is advises
