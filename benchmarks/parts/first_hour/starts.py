"""Good runs as new users start them, and when something of them is seen."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from easyrl.demo.prepared import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 600.0
_SAMPLE, _STEP = re.compile(r"response 0 \|"), re.compile(r"step 1/")
_SCRIPT = """\
from easyrl import train_policy


def reward(prompt, texts, token_ids):
    return [float(text.strip().endswith(prompt.answer)) for text in texts]


if __name__ == "__main__":
    prompts = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(9) for b in range(9)]
    settings = {"trainer.max_steps": 20, "rollout.max_tokens": 40, "samples.console_every": 1}
    train_policy(MODEL, prompts, reward, settings=settings)
"""


@dataclass(frozen=True)
class Seen:
    """Seconds from the command on."""

    first_line_s: float
    first_sample_s: float
    first_step_s: float

    def __str__(self) -> str:
        return (
            f"first line {self.first_line_s} s, first sample {self.first_sample_s} s, first step "
            f"{self.first_step_s} s"
        )


def start_all(folder: Path) -> Iterator[tuple[str, Seen]]:
    """Each in turn, ended once all has been seen."""
    own = folder / "up"
    own.mkdir(parents=True)
    easyrl = [sys.executable, "-m", "easyrl"]
    subprocess.run([*easyrl, "init", "--yes"], cwd=own, check=True, stdout=subprocess.DEVNULL)
    yield "up", _watch([*easyrl, "up", "easyrl.yaml"], own)
    demo = [sys.executable, "-m", "easyrl.demo", "--run-dir", str(folder / "demo")]
    yield "demo", _watch([*demo, "samples.console_every=5"], ROOT)
    scripts = folder / "script"
    scripts.mkdir()
    source = _SCRIPT.replace("MODEL", json.dumps(str(own / DEMO_MODEL)))
    (scripts / "script.py").write_text(source)
    yield "train_policy", _watch([sys.executable, "script.py"], scripts)


def _watch(command: Sequence[str], folder: Path) -> Seen:
    """Raises ``RuntimeError`` with the output of a run that ends before all was seen."""
    start_s = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put((time.monotonic() - start_s, line))
        lines.put((time.monotonic() - start_s, ""))

    threading.Thread(target=read, daemon=True).start()
    first: dict[str, float] = {}
    text = ""
    try:
        while len(first) < 3:
            seconds, line = lines.get(timeout=LIMIT_S)
            text += line
            if not line:
                raise RuntimeError(f"{' '.join(command)} ended before its first sample:\n{text}")
            first.setdefault("line", round(seconds, 1))
            for what, pattern in (("sample", _SAMPLE), ("step", _STEP)):
                if pattern.search(line):
                    first.setdefault(what, round(seconds, 1))
    finally:
        process.terminate()
        process.wait()
    return Seen(first["line"], first["sample"], first["step"])
