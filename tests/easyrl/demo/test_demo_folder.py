"""The demo begins anew in its folder, unless that is somebody else's or in use; nothing is lost."""

from __future__ import annotations

import sys

import pytest

from easyrl.demo import __main__ as command
from easyrl.demo import run as demo
from easyrl.runtime.run_folder import locked_folder
from tests.end_to_end.refused_runs import digests


class Built(Exception):
    """Everything before the warm start was let through."""


@pytest.fixture
def run_demo(monkeypatch, tmp_path):
    """Up to the warm start, which takes a minute; the status, if it ends before."""

    def build(*_, **__):
        raise Built

    monkeypatch.setattr(demo, "build_model", build)
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)

    class Output:
        def reconfigure(self, **_): ...
        def write(self, text): ...
        def flush(self): ...

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["demo", "--run-dir", str(tmp_path / "demo"), *arguments])
        monkeypatch.setattr(sys, "stdout", Output())
        return command.main()

    return run


@pytest.fixture
def used(tmp_path):
    folder = tmp_path / "demo"
    (folder / "base_model").mkdir(parents=True)
    (folder / "base_model" / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("{}")
    (folder / "run.lock").write_text("1 on host")
    return folder


def test_a_demo_that_is_going_on_is_not_wiped_out(run_demo, used, capsys):
    before = digests(used)
    with locked_folder(used, 0):
        assert run_demo() == 2
    assert digests(used) == before and "is in use by process" in capsys.readouterr().err


def test_a_folder_that_is_no_demos_is_left_as_it_is(run_demo, tmp_path, capsys):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("mine")
    assert run_demo() == 2
    assert digests(tmp_path / "demo").keys() == {"thesis.tex"}
    assert "holds something else" in capsys.readouterr().err


def test_a_bad_setting_is_refused_before_anything_is_removed(run_demo, used):
    before = digests(used)
    assert run_demo("trainer.max_step=3") == 2
    assert digests(used) == before


def test_an_earlier_demo_is_kept_beside_the_new_one(run_demo, used, tmp_path):
    before = digests(used)
    (tmp_path / "demo-1").mkdir()
    with pytest.raises(Built):
        run_demo()
    assert not (used / "metrics.jsonl").exists() and (used / "data").is_dir()
    kept = digests(tmp_path / "demo-2")
    assert kept == {name: digest for name, digest in before.items() if name != "run.lock"}


def test_a_demo_that_was_interrupted_in_its_warm_start_is_begun_anew(
    run_demo, monkeypatch, tmp_path, capsys
):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(demo, "build_model", interrupt)
        assert run_demo() == 130
    assert "interrupted before training began" in capsys.readouterr().err
    assert (tmp_path / "demo" / "data").is_dir()
    with pytest.raises(Built):
        run_demo()
