"""Mistakes in paths: where a run writes, what it resumes, what other commands are to read."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from benchmarks.parts.bad_input.scene import PROMPTS, SCRIPT, Mistake, script

RUN = "{folder}/run"
RESUME = ("train", "{folder}/config.yaml", "--resume")


def _mkdir(folder: Path) -> None:
    (folder / "run").mkdir()


def _loop(folder: Path) -> None:
    (folder / "run").symlink_to(folder / "run")


def _dangling(folder: Path) -> None:
    (folder / "run").symlink_to("/no/such/disk")


def _in_use(folder: Path) -> None:
    """This process, which is the benchmark, holds the folder's lock until it ends."""
    _mkdir(folder)
    descriptor = os.open(folder / "run" / "run.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _command(title: str, location: str | tuple[str, ...], *words: str, **rest: object) -> Mistake:
    return Mistake(title, location, command=words, **rest)  # type: ignore[arg-type]


ATTEMPT = json.dumps({"run": "easyrl-0", "attempt": 0})
MISTAKES = [
    Mistake("an output folder that is a file", ("run.output_dir", RUN), files={"run": "mine\n"}),
    Mistake(
        "an output folder below a file",
        "run.output_dir",
        ("run.output_dir={folder}/prompts.jsonl/run",),
    ),
    Mistake(
        "a place where nothing can be written", "run.output_dir", ("run.output_dir=/proc/run",)
    ),
    Mistake(
        "a name that is too long", "run.output_dir", (f"run.output_dir={{folder}}/{'r' * 300}",)
    ),
    Mistake("a link to itself", ("run.output_dir", RUN), prepare=_loop),
    Mistake("a link to nowhere", ("run.output_dir", RUN), prepare=_dangling),
    Mistake(
        "a folder with an earlier run", ("run.output_dir", RUN), files={"run/metrics.jsonl": "{}\n"}
    ),
    Mistake("a folder that another process uses", ("run.output_dir", RUN), prepare=_in_use),
    _command("a resume of no folder", ("run.output_dir", RUN), *RESUME),
    _command("a resume of an empty folder", ("run.output_dir", RUN), *RESUME, prepare=_mkdir),
    _command(
        "a resume of another folder", "run.output_dir", *RESUME, files={"run/notes.txt": "mine\n"}
    ),
    _command(
        "a resume with a damaged count",
        f"{RUN}/attempt.json",
        *RESUME,
        files={"run/attempt.json": "{"},
    ),
    _command(
        "a resume with a damaged certificate",
        (RUN, "certificate.jsonl"),
        *RESUME,
        files={"run/attempt.json": ATTEMPT, "run/certificate.jsonl": "not JSON\n\n{}\n"},
    ),
    _command(
        "a mistyped name of the folder",
        "{folder}/rum",
        "train",
        "{folder}/config.yaml",
        "run.output_dir={folder}/rum",
        "--resume",
        files={"run/attempt.json": ATTEMPT},
    ),
    Mistake(
        "a folder of weights that is missing",
        "weight_sync.directory",
        ("weight_sync.directory={folder}/shared",),
    ),
    Mistake(
        "a folder of weights that is a file",
        "weight_sync.directory",
        ("weight_sync.directory={folder}/prompts.jsonl",),
    ),
    _command(
        "a configuration that is missing", "{folder}/cofig.yaml", "train", "{folder}/cofig.yaml"
    ),
    _command("a folder as a configuration", "{folder}", "train", "{folder}"),
    _command(
        "an override where the file belongs", "trainer.max_steps=3", "train", "trainer.max_steps=3"
    ),
    _command(
        "the prompts as a configuration",
        "{folder}/prompts.jsonl",
        "train",
        "{folder}/prompts.jsonl",
    ),
    _command("verify of no folder", RUN, "verify", RUN),
    _command("verify of an empty folder", RUN, "verify", RUN, prepare=_mkdir),
    _command("verify of a file", "{folder}/prompts.jsonl", "verify", "{folder}/prompts.jsonl"),
    _command("verify without a folder", "RUN_DIR", "verify"),
    _command("replay of no folder", RUN, "replay", RUN, "--step", "1"),
    _command("replay of an empty folder", RUN, "replay", RUN, "--step", "1", prepare=_mkdir),
    _command("replay without a step", "--step", "replay", RUN),
    _command("replay of a step that is no number", "--step", "replay", RUN, "--step", "last"),
    _command("endpoints of no run", RUN, "endpoints", "list", RUN),
    _command("an endpoint for no run", RUN, "endpoints", "add", RUN, "http://host:8000"),
    _command("eval without held-out prompts", "evaluation", "eval", "{folder}/config.yaml"),
    _command("eval of no configuration", "{folder}/none.yaml", "eval", "{folder}/none.yaml"),
    Mistake(
        "train_policy on a used folder",
        "run.output_dir",
        command=SCRIPT,
        files=script("train_policy('{model}', ['1+1='], length, output_dir='{folder}/run')")
        | {"run/metrics.jsonl": "{}\n"},
        status=1,
    ),
    Mistake(
        "train_policy with a mistyped setting",
        "trainer.batch_sise",
        command=SCRIPT,
        files=script(
            "train_policy('{model}', ['1+1='], length, output_dir='{folder}/run', "
            "settings={'trainer.batch_sise': 3})"
        ),
        status=1,
    ),
    Mistake(
        "train_policy without prompts",
        "prompts",
        command=SCRIPT,
        files=script("train_policy('{model}', [], length, output_dir='{folder}/run')"),
        status=1,
    ),
    Mistake(
        "train_policy of no model",
        "model.path",
        command=SCRIPT,
        files=script("train_policy('{folder}/qwen', ['1+1='], length, output_dir='{folder}/run')"),
        status=1,
    ),
    Mistake(
        "train_policy with the prompts' file",
        "prompts",
        command=SCRIPT,
        files=script(
            "train_policy('{model}', '{folder}/prompts.jsonl', length, output_dir='{folder}/run')"
        )
        | {"prompts.jsonl": PROMPTS},
        status=1,
    ),
]
