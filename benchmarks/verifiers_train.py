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
        (
            *("data.max_prompt_tokens=32", "evaluation.data.max_prompt_tokens=32"),
            *("rollout.max_tokens=6", "evaluation.sampling.max_tokens=6"),
            *("trainer.max_steps=60", "trainer.batch_size=16", "trainer.learning_rate=1.5e-4"),
        ),
    ),
}


@dataclass(frozen=True)
class Learnt:
    """What came of a run."""

    start: float  # mean reward of the held-out prompts before the first step
    end: float  # and behind the last
    verified: str  # by ``easyrl verify``, in words
    on_policy: bool
    seconds: float

    def counted(self) -> dict[str, int]:
        """Episodes, turns and branches that were trained; raises ``ValueError`` if not told."""
        found = re.search(r"(\d+) episodes of (\d+) turns in (\d+) branch", self.verified)
        if found is None:
            raise ValueError(f"easyrl verify counts no episodes: {self.verified}")
        return dict(zip(("episodes", "turns", "branches"), map(int, found.groups()), strict=True))


def main() -> int:
    arguments = _parse()
    if not (arguments.library / "verifiers").is_dir():
        print(
            f"verifiers_train: {arguments.library} has no verifiers; install it there by make "
            "test-verifiers, or name another folder with --library",
            file=sys.stderr,
        )
        return 2
    disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: server and trainer end too
    rows = []
    with tempfile.TemporaryDirectory(prefix="easyrl-verifiers-") as folder:
        python = _interpreter(Path(folder), arguments.library.resolve())
        for name in arguments.only or TASKS:
            rows.append(_measure(name, Path(folder) / name, python))
    print(json.dumps({"rows": rows}))
    return 0 if all(map(is_expected, rows)) else 1


def is_expected(row: Mapping[str, Any]) -> bool:
    """Whether the model has learnt, the control not, and both runs were on-policy."""
    learnt = row["reward_end"] - row["reward_start"]
    of_control = row["reward_end_shuffled"] - row["reward_start"]
    return bool(learnt >= LEAST_GAIN and of_control < LEAST_GAIN / 2 and row["on_policy"])


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
    with started_servers("embedded", 1, model, folder) as servers:
        learnt = _trained(folder / "run", settings, servers)
        control = _trained(folder / "control", [*settings, "scoring.shuffle_rewards=true"], servers)
    row = {
        "environment": name,
        "reward_start": round(learnt.start, 4),
        "reward_end": round(learnt.end, 4),
        "reward_end_shuffled": round(control.end, 4),
        **learnt.counted(),
        "on_policy": learnt.on_policy and control.on_policy,
        "seconds": round(learnt.seconds, 1),
        "seconds_shuffled": round(control.seconds, 1),
    }
    print(
        "{environment}: reward {reward_start} at the start, {reward_end} at the end, "
        "{reward_end_shuffled} with shuffled rewards".format(**row),
        flush=True,
    )
    return row


def _trained(run_dir: Path, settings: list[str], servers: DemoServers) -> Learnt:
    """A run from the model that ``settings`` name, and what ``easyrl verify`` says of it."""
    start = time.monotonic()
    overrides = [f"run.output_dir={run_dir}", *settings]
    train(CONFIG, overrides, servers, layout=NamedLayout(), grace_s=30.0)
    seconds = time.monotonic() - start
    name = "eval/accuracy"  # rewards are 0 or 1
    means = [m[name] for m in read_metrics(run_dir / "metrics.jsonl") if name in m]
    command = [sys.executable, "-m", "easyrl", "verify", str(run_dir)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in result.stdout.splitlines() if "on-policy" in line]
    verified = said[0] if said else result.stdout.strip()
    print(f"{run_dir.name}: {seconds:.0f} s; verify: {verified}", flush=True)
    on_policy = result.returncode == 0 and verified.startswith("on-policy: ")
    return Learnt(means[0], means[-1], verified, on_policy, seconds)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--library", type=Path, default=Path(".verifiers"), help="folder that verifiers is in"
    )
    parser.add_argument("--only", nargs="+", choices=tuple(TASKS), help="environments")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
