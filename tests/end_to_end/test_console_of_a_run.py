"""What a run says of itself on a real terminal of 80 columns, and in its metrics: a slow reward."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import termios
import threading
from pathlib import Path

import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.trainer_run import ROOT, trainer_command, trainer_environment

pytestmark = pytest.mark.runs

REWARD_S = 0.7
SLOW = f"""
import time


def slow(prompt, texts, token_ids):
    time.sleep({REWARD_S})
    return [float(len(ids)) for ids in token_ids]
"""
CONTROL = re.compile(r"\x1b\[[?\d;]*[a-zA-Z]")


def on_terminal(command: list[str]) -> tuple[int, str]:
    """Exit status, and all that a terminal of 80 columns was sent."""
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    environment = trainer_environment(TERM="xterm")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=its, stdout=its, stderr=its, close_fds=True
    )
    os.close(its)
    said: list[bytes] = []

    def read() -> None:
        try:
            while part := os.read(ours, 65536):
                said.append(part)
        except OSError:  # nobody holds the other end any more
            return

    reader = threading.Thread(target=read)
    reader.start()
    status = process.wait(240)
    reader.join()
    os.close(ours)
    return status, b"".join(said).decode()


def test_a_terminal_shows_what_goes_on_and_metrics_have_its_seconds(served, tmp_path: Path):
    (tmp_path / "slow.py").write_text(SLOW)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8, 6)
    held_out = write_prompts(tmp_path / "held-out.jsonl", 3, 7, seed=1)
    data = f"{{files: [{held_out}], apply_chat_template: false, max_prompt_tokens: 16}}"
    run_dir = tmp_path / "run"
    status, said = on_terminal(
        trainer_command(
            run_dir,
            served.model,
            prompts,
            [served.url],
            "run.console=true",
            f"rewards=[{{file: {tmp_path / 'slow.py'}, function: slow}}]",
            f"evaluation={{data: {data}, every_steps: 1, sampling: {{max_tokens: 16}}}}",
            *("trainer.batch_size=4", "trainer.max_steps=2"),
            *("rollout.num_generations=4", "rollout.max_tokens=16"),
        )
    )
    assert status == 0, said[-3000:]
    shown = [CONTROL.sub("", line) for line in re.split(r"[\r\n]+", said)]
    progress = [line for line in shown if re.match(r"step \d/2  ", line)]
    assert any("waits for groups" in line for line in progress)
    assert any("waits for the evaluation" in line for line in progress)
    counts = [line for line in shown if line.startswith("groups ")]
    assert any(re.fullmatch(r"groups [0-3]/4  trained \d  in .*scoring \d.*", c) for c in counts)
    assert any("eval 1/3" in line or "eval 2/3" in line for line in shown)
    assert max(map(len, progress + counts)) <= 80
    # the last that stands there: the table, whose rows are not followed by where a step is
    assert not any(line.startswith(("step ", "groups ")) for line in shown[-4:])
    steps = {int(m["step"]): m for m in read_metrics(run_dir / "metrics.jsonl")}
    assert steps.keys() == {0, 1, 2}
    for step in (1, 2):
        # one worker: four groups of training, and three of the evaluation beside or behind it
        assert steps[step]["time/reward_s"] >= 4 * REWARD_S
        assert steps[step]["time/evaluation_s"] >= 3 * REWARD_S
    assert steps[2]["time/phase_evaluation_s"] >= 3 * REWARD_S  # alone, at the end
