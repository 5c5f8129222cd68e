"""Metrics are read on from where the last look ended, and anew where a run has cut its file."""

from __future__ import annotations

import json
from pathlib import Path

from easyrl.report.columns import MetricsFile
from easyrl.report.growing_file import GrowingFile


def line(step: int, **metrics: float | None) -> str:
    return json.dumps({"step": step, **metrics}) + "\n"


def values(metrics: MetricsFile, name: str) -> list[tuple[int, float]]:
    column = metrics.columns[name]
    return list(zip(column.steps, column.values, strict=True))


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    path, lines, restarts = tmp_path / "lines", [], []
    file = GrowingFile(path, lambda: restarts.append(1), lines.append)
    file.read_on()  # not there yet
    path.write_text("one\ntw")
    file.read_on()
    assert lines == [b"one\n"]
    with path.open("a") as more:
        more.write("o\nthree\n")
    file.read_on()
    file.read_on()
    assert lines == [b"one\n", b"two\n", b"three\n"] and not restarts


def test_a_file_that_was_cut_replaced_or_removed_is_read_anew(tmp_path: Path) -> None:
    path, lines, restarts = tmp_path / "lines", [], []
    file = GrowingFile(path, lambda: (restarts.append(1), lines.clear()), lines.append)
    path.write_text("one\ntwo\n")
    file.read_on()
    with path.open("r+") as cut:  # the same file, longer than before when it is looked at
        cut.truncate(4)
        cut.seek(4)
        cut.write("2\nthree\nfour\n")
    file.read_on()
    assert lines == [b"one\n", b"2\n", b"three\n", b"four\n"] and len(restarts) == 1
    other = tmp_path / "other"
    other.write_text("1\n2\nthree\nfour\n5\n")
    other.rename(path)
    file.read_on()
    assert lines[0] == b"1\n" and len(restarts) == 2
    path.unlink()
    file.read_on()
    assert lines == [] and len(restarts) == 3


def test_columns_are_of_all_lines_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        line(1, a=1.0) + line(2, a=2.0, b=None) + line(1, e=0.5) + '{"step": "no"}\ndamaged\n'
    )
    metrics = MetricsFile(path)
    metrics.read_on()
    assert values(metrics, "a") == [(1, 1.0), (2, 2.0)] and values(metrics, "e") == [(1, 0.5)]
    assert "b" not in metrics.columns and metrics.last_step == 2
    with path.open("a") as more:
        more.write(line(3, a=3.0) + line(1, a=7.0) + line(2, e=0.75))
    metrics.read_on()
    assert values(metrics, "a") == [(1, 7.0), (2, 2.0), (3, 3.0)]  # what is said again holds
    assert values(metrics, "e") == [(1, 0.5), (2, 0.75)] and metrics.last_step == 3


def test_a_resumed_run_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, a=1.0) + line(2, gone=2.0))
    metrics = MetricsFile(path)
    metrics.read_on()
    path.write_text(line(1, a=1.0))
    metrics.read_on()
    assert set(metrics.columns) == {"a"} and metrics.last_step == 1
