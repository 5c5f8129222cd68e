"""Whether environments of the ``verifiers`` library, unmodified, train a model, and a control not.

``python -m benchmarks.verifiers_train [--library .verifiers] [--only products|guessing]``

Both are in ``examples/verifiers`` and know nothing of EasyRL: one with a tool, products of two
numbers by a calculator, one of several turns, a number to be guessed in four. Each runs in a Python
without ours, with the library from a folder (``make test-verifiers`` installs it), and plays with a
small model that has seen its conversations held well and badly. A model is trained twice, the
second time with the rewards of each group shuffled among its episodes: that control must not learn.
Rewards are those of held-out prompts, played as episodes before the first step and behind the last.
``easyrl verify`` has to say on-policy. The last line is one JSON object; the exit status is 0 if
each reward rises by at least 0.3, and no control's by half as much.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from benchmarks.parts.verifiers_train.guessing_model import (
    MOST_TURNS,
    build_guessing_model,
    write_games,
)
from easyrl.demo.layouts import NamedLayout
from easyrl.demo.tools.build_model import build_model
from easyrl.demo.tools.task import write_splits
from easyrl.demo.training import DemoServers, started_servers, train
from easyrl.metrics.trackers import read_metrics

CONFIG = Path("configs/demo_tools.yaml")
EXAMPLES = Path("examples/verifiers").resolve()
LEAST_GAIN = 0.3
NUM_HELD_OUT = 256


@dataclass(frozen=True)
class Files:
    """Prompts to train with, and held-out ones."""

    train: Path
    held_out: Path


@dataclass(frozen=True)
class Task:
    """An environment, and what plays it."""

    build: Callable[[Path], None]  # writes the model
    write: Callable[[Path], Files]
    args: Mapping[str, Any]  # of load_environment
    settings: tuple[str, ...]


def _products(folder: Path) -> Files:
    return Files(*write_splits(folder, seed=0))


def _games(folder: Path) -> Files:
    folder.mkdir()
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    return Files(write_games(train, 4000, 1), write_games(held_out, NUM_HELD_OUT, 2))


TASKS = {
    "products": Task(build_model, _products, {"max_turns": 3}, ()),
    "guessing": Task(
        build_guessing_model,
        _games,
        {"max_turns": MOST_TURNS},
        ("trainer.max_steps=60", "rollout.max_tokens=6", "trainer.learning_rate=1e-4"),
    ),
}


def main() -> int:
    arguments = _parse()
    if not (arguments.library / "verifiers").is_dir():
        sys.exit(
            f"{arguments.library} has no verifiers: run make test-verifiers, which installs it"
        )
    disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: server and trainer end too
    rows = []
    with tempfile.TemporaryDirectory(prefix="easyrl-verifiers-") as folder:
        python = _interpreter(Path(folder), arguments.library.resolve())
        for name in [arguments.only] if arguments.only else TASKS:
            rows.append(_measure(name, Path(folder) / name, python))
    is_right = all(
        row["reward_end"] - row["reward_start"] >= LEAST_GAIN
        and row["reward_end_shuffled"] - row["reward_start"] < LEAST_GAIN / 2
        and row["on_policy"]
        for row in rows
    )
    print(json.dumps({"rows": rows}))
    return 0 if is_right else 1


def _interpreter(folder: Path, library: Path) -> Path:
    """A Python that has the library and the examples, and nothing of ours."""
    script = folder / "python"
    paths = f"{library}:{EXAMPLES}"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{paths}" exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return script


def _measure(name: str, folder: Path, python: Path) -> dict[str, Any]:
    task = TASKS[name]
    folder.mkdir()
    files, model = task.write(folder / "data"), folder / "base_model"
    print(f"{name}: the model sees conversations held well and badly", flush=True)
    task.build(model)
    environment = {
        "name": name,
        "verifiers": name,
        "args": dict(task.args),
        "python": str(python),
        "max_turns": 8,
    }
    settings = [
        f"model.path={model}",
        f"data.files=[{files.train}]",
        f"evaluation.data.files=[{files.held_out}]",
        f"evaluation.data.max_records={NUM_HELD_OUT}",
        f"environments=[{json.dumps(environment)}]",
        *task.settings,
    ]
    with ExitStack() as opened:
        servers = opened.enter_context(started_servers("embedded", 1, model, folder))
        start = time.monotonic()
        start_reward, end, verified = _trained(folder / "run", settings, servers)
        seconds = time.monotonic() - start
        control = [*settings, "scoring.shuffle_rewards=true"]
        _, shuffled, control_verified = _trained(folder / "control", control, servers)
    row = {
        "environment": name,
        "reward_start": round(start_reward, 3),
        "reward_end": round(end, 3),
        "reward_end_shuffled": round(shuffled, 3),
        **_counted(verified),
        "on_policy": "on-policy" in verified and "on-policy" in control_verified,
        "seconds": round(seconds, 1),
    }
    print("{environment}: {reward_start} to {reward_end}".format(**row), end=", ")
    print("shuffled {reward_end_shuffled}; {seconds} s a run".format(**row), flush=True)
    return row


def _trained(run_dir: Path, settings: list[str], servers: DemoServers) -> tuple[float, float, str]:
    """The held-out reward before and behind a run, and what ``easyrl verify`` says of it."""
    overrides = [f"run.output_dir={run_dir}", *settings]
    train(CONFIG, overrides, servers, layout=NamedLayout(), grace_s=30.0)
    found = [
        m["eval/accuracy"] for m in read_metrics(run_dir / "metrics.jsonl") if "eval/accuracy" in m
    ]
    command = [sys.executable, "-m", "easyrl", "verify", str(run_dir)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    print(said.strip(), flush=True)
    return found[0], found[-1], said


def _counted(verified: str) -> dict[str, int]:
    """Episodes, turns and branches, as the certificate's sentence has them."""
    found = re.search(r"([\d,]+) episodes of ([\d,]+) turns in ([\d,]+) branches", verified)
    names = ("episodes", "turns", "branches")
    if found is None:
        return dict.fromkeys(names, 0)
    return {
        name: int(said.replace(",", "")) for name, said in zip(names, found.groups(), strict=True)
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", type=Path, default=Path(".verifiers"))
    parser.add_argument("--only", choices=tuple(TASKS))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
