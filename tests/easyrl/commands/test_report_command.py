"""``easyrl report``: writes a file, again while the run goes on, and says what is no run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.parts.long_run import LongRun, write_long_run
from easyrl.__main__ import command_line
from easyrl.commands import report as report_command


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_long_run(tmp_path / "run", LongRun(num_steps=3, num_batches=1, num_endpoints=1))
    return tmp_path / "run"


def call(*arguments: object):
    return CliRunner().invoke(command_line(), ["report", *map(str, arguments)])


def test_a_report_is_written_and_its_certificate_looked_for(run_dir: Path) -> None:
    told = call(run_dir)
    assert told.exit_code == 0 and told.output.strip().endswith("report.html")
    page = (run_dir / "report.html").read_text()
    assert "has no certificate.jsonl" in page and 'class="panel verdict unknown"' in page
    assert call(run_dir, "--output", run_dir / "other.html").exit_code == 0
    assert (run_dir / "other.html").is_file()


def test_a_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    refused = call(tmp_path)
    assert (
        refused.exit_code == 2 and "has no config.yaml; name the run.output_dir" in refused.output
    )
    assert not (tmp_path / "report.html").exists()


def test_a_watched_run_is_written_again_when_it_has_gone_on(run_dir: Path, monkeypatch) -> None:
    pages = []

    mark = run_dir / "report.html.written.svg"
    marks = []

    def sleep(seconds: float) -> None:
        marks.append(mark.read_text())
        pages.append((run_dir / "report.html").read_text())
        if len(pages) == 1:
            with (run_dir / "metrics.jsonl").open("a") as file:
                file.write('{"step": 4, "reward/mean": 1.0}\n')
        elif len(pages) == 2:
            (run_dir / "report.html").write_text("as it was")  # nothing new: not written again
        elif len(pages) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(report_command.time, "sleep", sleep)
    assert call(run_dir, "--watch").exit_code == 0
    first, second, third = pages
    assert "<b>3</b>" in first and 'id="follow"' in first
    assert "<b>4</b>" in second and third == "as it was"
    last = (run_dir / "report.html").read_text()
    assert "<b>4</b>" in last and 'id="follow" checked' not in last  # loads itself no more
    assert marks[1] == marks[2] and not mark.exists()
    for page, said in ((first, marks[0]), (second, marks[1])):
        (number,) = re.findall(r'"number":(\d+)', page)
        assert f'width="{number}"' in said
