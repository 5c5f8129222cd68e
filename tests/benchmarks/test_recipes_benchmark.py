"""The benchmark of what recipes learn: what it trains, its rows, its verdict, and a short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.parts.recipes import run
from benchmarks.parts.recipes.ready_files import (
    DISTANT_BOUNDS,
    FOLDER,
    NO_GROUP_BASELINE,
    ReadyFile,
    ready_files,
)
from benchmarks.parts.recipes.report import Learnt, markdown, page, plot
from benchmarks.parts.recipes.rows import Key, Kind, Measured, Row, Rows
from benchmarks.parts.row_file import rows_file
from benchmarks.recipes import Measurement
from easyrl.config.file import load_config
from easyrl.demo.build_model import build_model
from easyrl.recipes.loading import BUILT_IN, load_recipe
from tests.end_to_end.trainer_run import ROOT

KEY = Key("rpo", "async", 1, 60, "0123", "abcd")
MEASURED = Measured(0.75, 41.5, [0.25, 0.5])


# ---- what is trained -----------------------------------------------------------------------------


def test_every_recipe_on_rollouts_is_trained() -> None:
    files = ready_files()
    named = {path.stem for path in FOLDER.glob("*.yaml")}
    assert set(files) == {name for name in named if BUILT_IN[name].source == "rollouts"}
    for file in files.values():
        assert file.streams == (load_recipe(file.config).scope == "group")
        assert file.num_steps(file.num_batches) == file.config.trainer.max_steps
    assert files["rloo"].streams and not files["reinforce_pp"].streams
    assert {name for name, file in files.items() if file.has_teacher} == {"distillation"}
    assert {name for name, file in files.items() if file.has_critic} == {"ppo", "pf_ppo"}
    clipping = {name for name, file in files.items() if file.clips}
    assert {"dapo", "gspo", "two_sided", "dual_clip", "ppo"} <= clipping
    assert {"cispo"} == DISTANT_BOUNDS
    assert not {"grpo", "rloo", "rpo", "distillation"} & clipping  # one update, or no bound


def test_a_new_ready_file_is_found_by_being_there(tmp_path: Path) -> None:
    for name, copied in (("another", "rloo"), ("taught", "distillation"), ("records", "sft")):
        (tmp_path / f"{name}.yaml").write_text((FOLDER / f"{copied}.yaml").read_text())
    assert list(ready_files(tmp_path)) == ["another", "taught"]


@pytest.mark.parametrize("kind", ["async", "sync", "shuffled"])
@pytest.mark.parametrize("name", ready_files())
def test_a_run_is_the_ready_file_s_but_for_what_tells_runs_apart(
    tmp_path: Path, name: str, kind: Kind
) -> None:
    file = ready_files()[name]
    task = task_in(tmp_path)
    command = task.command(file, kind, 2, 3, tmp_path / "run")
    assert command[1:5] == ["-m", "easyrl", "train", str(file.path)]
    config = load_config(Path(command[4]), command[5:])
    own = {"teacher": str(task.teacher)} if file.has_teacher else {}
    assert config.recipe.name == file.config.recipe.name
    assert config.recipe.settings == file.config.recipe.settings | own
    assert config.rewards == file.config.rewards
    assert config.rollout == file.config.rollout
    changed = {
        key
        for key, value in config.trainer.model_dump().items()
        if value != file.config.trainer.model_dump()[key]
    }
    assert changed <= {"max_steps"}
    assert config.trainer.max_steps == 3 * config.trainer.updates_per_batch
    assert config.run.mode == ("sync" if kind == "sync" else "async") and config.run.seed == 2
    across = "across_prompts" if name in NO_GROUP_BASELINE else True
    assert config.scoring.shuffle_rewards == (across if kind == "shuffled" else False)
    assert config.evaluation is None and config.checkpoint.export_at_end
    assert config.inference.launch is not None and not config.inference.endpoints
    if not file.has_teacher:
        assert load_recipe(config) == load_recipe(file.config)


def task_in(folder: Path) -> run.Task:
    (folder / "base_model").mkdir()  # is taken to be made
    return run.Task(folder)


def test_the_model_is_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def interrupted(output: Path, seed: int) -> None:
        made.append(output)
        output.mkdir()
        if len(made) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(run, "build_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.Task(tmp_path)
    for _ in range(2):
        assert run.Task(tmp_path).model.is_dir()
    assert len(made) == 2


def test_the_teacher_is_made_once_and_only_for_the_distillation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def build(output: Path, seed: int) -> None:
        made.append(output)
        output.mkdir()

    def trained(command: list[str], log: Path, *_: object) -> None:
        folder = log.with_suffix("")
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 4, **CLIPPED[0]}) + "\n")

    monkeypatch.setattr(run, "build_teacher", build)
    monkeypatch.setattr(run, "run_command", trained)
    monkeypatch.setattr(run, "held_out_accuracy", lambda model, *_, **__: len(str(model)))
    task, files = task_in(tmp_path), ready_files()
    assert task.run(files["dapo"], "async", 0, 1).clip_fraction == 0.375 and not made
    for seed in range(2):
        task.run(files["distillation"], "async", seed, 1)
    assert task.of_teacher().accuracy == len(str(task.teacher)) and task.teacher.is_dir()
    assert len(made) == 1


CLIPPED = [
    {"policy/clip_low": 0.125, "policy/clip_high": 0.25, "update4/policy/clip_low": 0.75},
    {"policy/clip_low": 0.5, "policy/clip_high": 0.0, "critic/clip_fraction": 0.875},
    {"eval/accuracy": 0.5},
]


def test_what_is_read_of_the_metrics() -> None:
    assert run.clip_fraction(CLIPPED) == 0.5 and run.clip_fraction(CLIPPED[:1]) == 0.375
    assert run.clip_fraction([{"policy/ratio": 1.0}]) is None
    explained = [-9.0, 0.1, 0.2, 0.3, 0.4, 0.5, -9.0, 0.6]
    metrics: list[dict[str, float]] = [{}]  # of the step before the first
    metrics += [{"critic/explained_variance": value} for value in explained]
    assert run.explained_variance(metrics) == pytest.approx(0.3)
    assert run.explained_variance(metrics[:5]) is None  # four batches


# ---- rows ----------------------------------------------------------------------------------------


def never() -> Measured:
    raise AssertionError("measured again")


def test_a_row_is_measured_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert Rows(path).get(KEY, lambda: MEASURED).measured == MEASURED
    assert Rows(path).get(KEY, never) == Row(KEY, MEASURED)
    with path.open("ab") as file:
        file.write(b'{"key": {"reci')  # was being written when the process was killed
    assert Rows(path).find(KEY) == Row(KEY, MEASURED)


def test_a_row_without_the_later_columns_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Rows(path).get(KEY, lambda: MEASURED)
    row = json.loads(path.read_text())
    del row["measured"]["explained_variance"], row["measured"]["clip_fraction"]
    path.write_text(json.dumps(row) + "\n")
    assert Rows(path).get(KEY, never).measured == MEASURED


@pytest.mark.parametrize(
    "other",
    [
        Key("grpo", "async", 1, 60, "0123", "abcd"),
        Key("rpo", "sync", 1, 60, "0123", "abcd"),
        Key("rpo", "async", 0, 60, "0123", "abcd"),
        Key("rpo", "async", 1, 30, "0123", "abcd"),
        Key("rpo", "async", 1, 60, "4567", "abcd"),  # the ready file has changed
    ],
    ids=["recipe", "kind", "seed", "batches", "file"],
)
def test_another_run_is_not_taken_for_it(tmp_path: Path, other: Key) -> None:
    path = tmp_path / "rows.jsonl"
    Rows(path).get(KEY, lambda: MEASURED)
    assert Rows(path, of_any_revision=True).find(other) is None


def test_another_revision_s_row_counts_where_that_is_asked_for(tmp_path: Path) -> None:
    path, later = tmp_path / "rows.jsonl", Key("rpo", "async", 1, 60, "0123", "ef01")
    Rows(path).get(KEY, lambda: MEASURED)
    assert Rows(path).find(later) is None
    assert Rows(path, of_any_revision=True).get(later, never).key.revision == "abcd"


def test_rows_that_were_kept_are_gone_on_with_where_there_are_none(tmp_path: Path) -> None:
    kept, out = tmp_path / "kept.jsonl", tmp_path / "out"
    out.mkdir()
    assert not rows_file(out, kept, resume=True).exists()
    Rows(kept).get(KEY, lambda: MEASURED)
    assert not rows_file(out, kept, resume=False).exists()
    for _ in range(2):
        assert Rows(rows_file(out, kept, resume=True)).get(KEY, never).measured == MEASURED
        kept.write_text("")  # those of OUT come first
    assert not rows_file(out, kept, resume=False).exists() and len(list(out.iterdir())) == 1


def test_the_runs_of_a_recipe(tmp_path: Path) -> None:
    """Three seeds, one synchronous, one with shuffled rewards; no more of them than is wanted."""
    trained: list[tuple[str, Kind, int, int]] = []

    def train(file: ReadyFile, kind: Kind, seed: int, num_batches: int) -> Measured:
        trained.append((file.recipe, kind, seed, num_batches))
        return MEASURED

    start = Measured(0.25, 0.0, [])
    task = cast(run.Task, SimpleNamespace(run=train, start=lambda: start))
    rows = Rows(tmp_path / "rows.jsonl")
    files = ready_files()
    learnt = Measurement(task, rows, "abcd", None, 3).learnt(files["gspo"])
    batches = files["gspo"].num_batches
    kinds: list[tuple[Kind, int]] = [("async", 0), ("async", 1), ("async", 2)]
    kinds += [("sync", 0), ("shuffled", 0)]
    assert trained == [("gspo", kind, seed, batches) for kind, seed in kinds]
    assert learnt.start.measured == start and len(learnt.runs) == 5
    assert Measurement(task, rows, "abcd", None, 3).learnt(files["gspo"]) == learnt
    assert len(trained) == 5
    Measurement(task, rows, "abcd", 10_000, 3).learnt(files["gspo"])  # more than it has
    assert len(trained) == 5
    Measurement(task, rows, "abcd", 2, 1).learnt(files["gspo"])
    assert [each[3] for each in trained[5:]] == [2, 2, 2]


def test_the_runs_of_the_distillation(tmp_path: Path) -> None:
    """Beside its teacher, and none with shuffled rewards; a run that fails is made again, alone."""
    made: list[str] = []
    failing = ["sync"]

    def train(file: ReadyFile, kind: Kind, seed: int, num_batches: int) -> Measured:
        made.append(f"{kind} {seed}")
        if kind in failing:
            raise RuntimeError(kind)
        return MEASURED

    def teacher() -> Measured:
        made.append("teacher")
        return Measured(0.95, 0.0, [])

    start = Measured(0.25, 0.0, [])
    task = SimpleNamespace(run=train, start=lambda: start, of_teacher=teacher)
    rows, file = Rows(tmp_path / "rows.jsonl"), ready_files()["distillation"]
    measurement = Measurement(cast(run.Task, task), rows, "abcd", None, 3)
    with pytest.raises(RuntimeError):
        measurement.learnt(file)
    assert made == ["teacher", "async 0", "async 1", "async 2", "sync 0"]
    failing.clear()
    learnt = measurement.learnt(file)
    assert made[5:] == ["sync 0"] and learnt.shuffled is None
    assert len(learnt.runs) == measurement.num_runs(file) == 4
    assert learnt.teacher is not None and learnt.teacher.measured.accuracy == 0.95


# ---- what it means -------------------------------------------------------------------------------


def learnt(
    asynchronous: list[float],
    sync: float = 0.9,
    shuffled: float | None = 0.3,
    seconds: float = 40.0,
    *,
    teacher: float | None = None,
    explained: Sequence[float | None] = (),
    clipped: Sequence[float | None] = (),
) -> Learnt:
    """``explained``, ``clipped``: of the asynchronous runs, where that is expected of them."""

    def row(kind: Kind, accuracy: float, seed: int = 0) -> Row:
        key = Key("rpo", kind, seed, 60, "0123", "abcd")
        measured = Measured(accuracy, seconds if kind in ("async", "sync", "shuffled") else 0.0, [])
        if kind == "async":
            measured.explained_variance = explained[seed] if explained else None
            measured.clip_fraction = clipped[seed] if clipped else None
        return Row(key, measured)

    return Learnt(
        "rpo",
        True,
        bool(explained),
        bool(clipped),
        start=row("start", 0.3),
        sync=row("sync", sync),
        asynchronous=[row("async", accuracy, seed) for seed, accuracy in enumerate(asynchronous)],
        shuffled=None if shuffled is None else row("shuffled", shuffled),
        teacher=None if teacher is None else row("teacher", teacher),
    )


def test_the_last_line_s_row() -> None:
    row = learnt([0.9, 0.8, 1.0]).row()
    expected = {
        "recipe": "rpo",
        "start": 0.3,
        "sync": 0.9,
        "async": 0.9,
        "shuffled": 0.3,
        "streams": True,
        "teacher": None,
        "explained_variance": None,
        "clip_fraction": None,
    }
    assert {key: row[key] for key in expected} == expected
    assert row["async_seeds"] == [0.9, 0.8, 1.0] and json.dumps(row)
    taught = learnt([0.9], shuffled=None, teacher=0.95).row()
    assert (taught["shuffled"], taught["teacher"]) == (None, 0.95)
    valued = learnt([0.9, 0.8], explained=[0.5, 0.25], clipped=[0.25, 0.5]).row()
    assert (valued["explained_variance"], valued["clip_fraction"]) == (0.375, 0.375)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (learnt([0.9, 0.8, 1.0]), []),
        (learnt([0.61, 0.7, 0.7], sync=0.61, shuffled=0.44), []),
        (learnt([0.9, 0.55, 0.9]), ["async, seed 1: 0.550 is not 0.3 above the start, 0.300"]),
        (learnt([0.9], sync=0.5), ["sync: 0.500 is not 0.3 above the start, 0.300"]),
        (learnt([0.9], shuffled=0.5), ["shuffled rewards: 0.500 is more than 0.15 above"]),
        (learnt([0.9], seconds=75.0), ["a run took 75 s, more than 60"]),
        (learnt([0.91], sync=0.92, shuffled=None, teacher=0.95), []),
        (
            learnt([0.91, 0.89], sync=0.88, shuffled=None, teacher=0.95),
            [
                "async, seed 1: 0.890 is more than 0.05 below the teacher, 0.950",
                "sync: 0.880 is more than 0.05 below the teacher, 0.950",
            ],
        ),
        (learnt([0.9, 0.9], explained=[0.2, 0.42], clipped=[1e-4, 0.1]), []),
        (
            learnt([0.9, 0.9], explained=[0.2, 0.4]),
            ["explained variance 0.3 is not above 0.3"],
        ),
        (
            learnt([0.9, 0.9], explained=[0.9, None]),
            ["explained variance None is not above 0.3"],
        ),
        (learnt([0.9, 0.9], clipped=[0.0, 0.0]), ["no bound of the ratio acted"]),
        (learnt([0.9, 0.9], clipped=[0.1, None]), ["no bound of the ratio acted"]),
    ],
    ids=[
        *("all", "just so", "one seed", "synchronous", "control", "long"),
        *(
            "taught",
            "below the teacher",
            "valued",
            "no value",
            "an unknown value",
            "not clipped",
            "unknown clips",
        ),
    ],
)
def test_what_is_not_as_expected_is_said(found: Learnt, said: list[str]) -> None:
    problems = found.problems()
    for problem, each in zip(problems, said, strict=True):
        assert problem.startswith(f"rpo: {each}")
    text = page([found], "x.png", None)
    assert all(f"- {problem}" in text for problem in problems)
    assert ("As expected, all of them." in text) == (not problems)
    assert markdown([found]) in text and "![accuracy of each recipe](x.png)" in text


def test_the_figure(tmp_path: Path) -> None:
    several = [
        learnt([0.9, 0.8, 1.0]),
        learnt([0.5, 0.6, 0.7], shuffled=0.1),
        learnt([0.9, 0.8, 1.0], shuffled=None, teacher=0.95),
    ]
    plot(several, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


# ---- a run ---------------------------------------------------------------------------------------


def benchmark(*arguments: str) -> tuple[int, str, dict[str, Any]]:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.recipes", *arguments],
        cwd=ROOT,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.stdout, result.stderr[-3000:]
    return result.returncode, result.stderr, json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow  # minutes, of a benchmark
def test_a_short_benchmark_and_its_second_part(tmp_path: Path) -> None:
    build_model(tmp_path / "base_model", num_steps=30)  # knows next to nothing
    arguments = ["--recipes", "rpo", "--max-batches", "1", "--seeds", "1", "--out", str(tmp_path)]
    status, said, found = benchmark(*arguments)
    assert status == 3 and "rpo: async, seed 0" in said  # one step teaches nothing
    (row,) = found["rows"]
    assert row["recipe"] == "rpo" and row["streams"] and row["seconds"] > 0
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert (tmp_path / "recipes-results.md").exists() and not list(tmp_path.glob("rpo-*/"))
    again = benchmark(*arguments, "--resume")
    assert again[0] == 3 and again[2] == found
    assert (tmp_path / "rows.jsonl").read_text().splitlines() == lines
