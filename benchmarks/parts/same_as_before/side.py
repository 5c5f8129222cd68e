"""One of the two checkouts, driven from outside: its server and its trainer as command lines.

Nothing of either's code is imported, so it does not matter where in it anything is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.parts.same_as_before.settings import NUM_BATCHES, Inputs, Setting
from benchmarks.parts.same_as_before.tensors import State, read_states, unchanged

SERVER = ["--batch-invariant", "--max-model-len", "64", "--dtype", "float32", "--num-threads", "1"]
START_TIMEOUT_S, RUN_TIMEOUT_S = 120.0, 300.0
TAIL = 4000  # characters of a log that are shown
# What a launcher around this process would have set for it.
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


class Failed(RuntimeError):
    """A comparison cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Side:
    """A checkout and the form of its configuration."""

    name: str
    checkout: Path
    form: Callable[[Setting, Inputs, Path], dict[str, Any]]
    folder: Path  # for its runs and logs

    def check(self) -> None:
        """Raises ``Failed`` if another checkout's code would run, an installed one for instance."""
        command = [sys.executable, "-c", "import easyrl; print(easyrl.__file__)"]
        result = subprocess.run(
            command, cwd=self.checkout, env=self.environment(), capture_output=True, text=True
        )
        if result.returncode or not Path(result.stdout.strip()).is_relative_to(self.checkout):
            raise Failed(
                f"{self.name}: easyrl is imported from {result.stdout.strip() or result.stderr}, "
                f"not from {self.checkout}"
            )

    def environment(self) -> dict[str, str]:
        """One thread, on the CPU, with this checkout and this interpreter's commands first."""
        inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
        return {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(self.checkout),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    @contextmanager
    def process(self, command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """``command`` in the checkout, in a session of its own that ends with the block."""
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=self.checkout,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @contextmanager
    def server(self, model: Path) -> Iterator[str]:
        """The URL of its embedded server, in strict mode's manner."""
        port, log = free_port(), self.folder / "server.log"
        command = [sys.executable, "-m", "easyrl", "serve", str(model), "--port", str(port)]
        with ExitStack() as opened:
            process = opened.enter_context(self.process([*command, *SERVER], log))
            wait_until_healthy(process, port, log)
            yield f"http://127.0.0.1:{port}"

    def train(self, setting: Setting, inputs: Inputs) -> list[State]:
        """The states after each batch of a run of ``setting``.

        Raises ``Failed`` for a run that fails, and for one with which nothing could be shown.
        """
        run_dir = self.folder / setting.folder
        config, log = run_dir.with_suffix(".yaml"), run_dir.with_suffix(".log")
        config.write_text(yaml.safe_dump(self.form(setting, inputs, run_dir)))
        with self.process(train_command(setting, config), log) as process:
            try:
                status = str(process.wait(RUN_TIMEOUT_S))
            except subprocess.TimeoutExpired:
                status = f"none after {RUN_TIMEOUT_S:.0f} s"
        if status != "0":
            raise Failed(f"{self.name}, {setting}: exit status {status}\n{tail(log)}")
        states = read_states(run_dir)
        self._refuse_what_shows_nothing(setting, run_dir, states)
        return states

    def _refuse_what_shows_nothing(
        self, setting: Setting, run_dir: Path, states: list[State]
    ) -> None:
        where = f"{self.name}, {setting}"
        if len(states) != NUM_BATCHES:
            raise Failed(f"{where}: {len(states)} checkpoints of {NUM_BATCHES} batches")
        # Two runs in which nothing is trained are equal, whatever their code does.
        if same := unchanged(states):
            raise Failed(f"{where}: the same after batch 1 and batch {NUM_BATCHES}: {same}")
        # A group of equal rewards has no advantage; whether it is trained is not asked here.
        if (flat := flat_batches(run_dir / "metrics.jsonl")) > 0:
            raise Failed(
                f"{where}: in {flat} batches a group had equal rewards; change the reward function "
                "or the prompts' seed"
            )


def train_command(setting: Setting, config: Path) -> list[str]:
    """As users start it: plain with one rank, by the launcher with several."""
    if setting.ranks == 1:
        return [sys.executable, "-m", "easyrl.train", str(config)]
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    start = [sys.executable, launcher, "--num_accelerators", str(setting.ranks)]
    return [*start, "--master_port", str(free_port()), "--module", "easyrl.train", str(config)]


def flat_batches(metrics: Path) -> int:
    """Steps in which a group had equal rewards. Raises ``Failed`` if no step says it."""
    key = "reward/flat_groups"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    said = [step[key] for step in steps if key in step]
    if not said:
        raise Failed(f"{metrics.name} has no {key}")
    return sum(share > 0 for share in said)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Raises ``Failed`` if the server ends, or does not answer for ``START_TIMEOUT_S``."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _is_healthy(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise Failed(f"a server did not start\n{tail(log)}")
        time.sleep(0.2)


def tail(log: Path) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-TAIL:]


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
