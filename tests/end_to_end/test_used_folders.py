"""Whatever is refused on a used folder leaves every file of it as it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.runtime.run_folder import locked_folder
from tests.end_to_end.refused_runs import changed, digests
from tests.end_to_end.trainer_run import (
    ROOT,
    run_trainer,
    trainer_command,
    trainer_environment,
)

pytestmark = pytest.mark.runs

STEPS, BATCH = 2, 2
OPTIONS = (
    *(f"trainer.batch_size={BATCH}", f"trainer.max_steps={STEPS}", "trainer.grace_s=0.2"),
    *("rollout.num_generations=2", "rollout.max_tokens=4", "recipe.kl_coef=0.1"),
    *("checkpoint.every_steps=1", "checkpoint.export_at_end=true"),
)


class FinishedRun(NamedTuple):
    folder: Path
    command: list[str]  # arguments of ``easyrl train``


@pytest.fixture(scope="module")
def finished(served, tmp_path_factory) -> Iterator[FinishedRun]:
    folder = tmp_path_factory.mktemp("refusals")
    prompts = write_prompts(folder / "prompts.jsonl", 2 * STEPS * BATCH, 12)
    command = trainer_command(folder / "run", served.model, prompts, [served.url], *OPTIONS)
    run_trainer(command)
    yield FinishedRun(folder / "run", command[command.index("easyrl.train") + 1 :])


def start_all(run: FinishedRun, commands: list[list[str]]) -> list[Any]:
    """Status, text and changed files of each, one after another in one process."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.refused_runs", run.folder, json.dumps(commands)],
        cwd=ROOT,
        env=trainer_environment(),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-5000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_no_refusal_changes_a_file(finished, served, tmp_path):
    other_prompts = write_prompts(tmp_path / "prompts.jsonl", 2 * STEPS * BATCH, 12, seed=7)
    other_model = shutil.copytree(served.model, tmp_path / "model")
    weights = other_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    (tmp_path / "broken.py").write_text("raise RuntimeError('broken')")
    resume, more = "--resume", "trainer.max_steps=3"
    cases = {
        "holds an earlier run; add --resume": [],
        "put back run.seed": [resume, more, "run.seed=7"],
        "put back data.*": [resume, more, f"data.files=[{other_prompts}]"],
        "trainer.batch_size=2": [resume, more, "trainer.batch_size=1"],
        "is not the one that the checkpoint was trained with": [
            resume, more, f"model.path={other_model}",
        ],
        "rewards[0].file": [resume, more, f"rewards=[{{file: {tmp_path / 'broken.py'}}}]"],
        "inference.endpoints": [
            resume, more, "inference.endpoints=[http://127.0.0.1:9]",
            "inference.startup_timeout_s=1",
        ],
    }  # fmt: skip
    results = start_all(finished, [[*finished.command, *further] for further in cases.values()])
    assert {
        needle: (status, needle in said, files)
        for needle, (status, said, files) in zip(cases, results, strict=True)
    } == {needle: (2, True, []) for needle in cases}


def test_a_broken_account_is_refused_and_left_as_it_is(finished):
    """Also its last line, cut off: it may be evidence."""
    certificate, attempts = finished.folder / "certificate.jsonl", finished.folder / "attempt.json"
    whole, count = certificate.read_bytes(), attempts.read_bytes()
    written = certificate.stat()
    command = [*finished.command, "--resume", "trainer.max_steps=3"]
    try:
        certificate.write_bytes(whole + b'{"kind":"att')
        (torn,) = start_all(finished, [[*command, "run.seed=7"]])
        certificate.write_bytes(whole.replace(b'"step":1', b'"step":9', 1))
        (broken,) = start_all(finished, [command])
        certificate.write_bytes(whole)
        attempts.write_text("{")
        (uncounted,) = start_all(finished, [command])
    finally:
        certificate.write_bytes(whole)
        os.utime(certificate, ns=(written.st_atime_ns, written.st_mtime_ns))
        attempts.write_bytes(count)
    assert [(status, files) for status, _, files in (torn, broken, uncounted)] == [(2, [])] * 3
    assert "put back run.seed" in torn[1]
    assert "certificate.jsonl line" in broken[1] and "attempt.json" in uncounted[1]


def test_a_folder_that_another_process_holds_is_left_as_it_is(finished):
    before = (finished.folder / "run.lock").read_bytes
    with locked_folder(finished.folder, 0):
        holder = before()
        ((status, said, files),) = start_all(finished, [[*finished.command, "--resume"]])
        assert before() == holder
    assert (status, files) == (2, []) and f"in use by process {os.getpid()}" in said


def test_resume_of_what_is_no_run_names_what_is_there_and_near(finished):
    folder = finished.folder.parent
    (folder / "empty").mkdir(exist_ok=True)
    (folder / "empty" / "notes.txt").write_text("mine")
    before = digests(folder)
    results = start_all(
        finished,
        [
            [*finished.command, f"run.output_dir={folder / name}", "--resume"]
            for name in ("runn", "empty", "nowhere/at/all")
        ],
    )
    assert not changed(before, digests(folder)) and not (folder / "runn").exists()
    mistyped, empty, nowhere = (said for status, said, _ in results if status == 2)
    assert f"{folder / 'runn'} does not exist" in mistyped
    assert f"did you mean {finished.folder}?" in mistyped and "leave --resume off" in mistyped
    assert "holds no run" in empty and "notes.txt" in empty
    assert f"{folder / 'nowhere'} does not exist" in nowhere


def test_resume_of_a_finished_run_is_a_success_that_says_how_to_go_on(finished):
    """Who restarts until the status is 0 must come to an end."""
    ((status, said, files),) = start_all(finished, [[*finished.command, "--resume"]])
    assert (status, files) == (0, [])
    assert f"{finished.folder} is finished" in said and f"after {STEPS} steps" in said
    assert "raise trainer.max_steps" in said and str(finished.folder / "model") in said


def test_what_was_not_exported_at_the_end_is_exported_by_the_next_start(finished):
    """A process that was killed behind the run's last line."""
    export = finished.folder / "model"
    files = digests(export)
    shutil.rmtree(export)
    ((status, said, _),) = start_all(finished, [[*finished.command, "--resume"]])
    assert (status, digests(export)) == (0, files), said
