"""Runs by themselves: all rollouts fail, what they need is gone, a thousand are asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import benchmarks.parts.hostile.episodes.failing_environment as environment
from benchmarks.parts.chaos.attempt import Attempt
from benchmarks.parts.launched_run import start_servers
from easyrl.schema import NEEDS_CHANGE, TEMPORARY_FAILURE

LIMIT_S = 240.0
TICK_S = 0.1
MOST_OPEN = 8
OUTAGE_S = 4


@dataclass(frozen=True)
class FailingRun:
    """One.

    Attributes:
        status: exit status that it has to end with.
        says: in the sentence that it ends with.
    """

    name: str
    does: str  # each of its rollouts (``failing_environment``)
    status: int
    says: str
    num_groups: int = 8
    num_steps: int = 2


RUNS = (
    FailingRun("all-rollouts-fail", "fail", NEEDS_CHANGE, "rollouts of wild in a row failed"),
    FailingRun(
        "environment-away", "need a server", TEMPORARY_FAILURE, "start what it connects to again"
    ),
    FailingRun(
        "endpoints-gone-before-a-turn", "end the endpoints", TEMPORARY_FAILURE, "max_outage_s"
    ),
    FailingRun("a-thousand-rollouts", "be many", 0, "", num_groups=250, num_steps=1),
)


def run_failing(folder: Path, model: Path, config: str, settings: Sequence[str]) -> list[str]:
    """What is wrong with how they ended; ``settings`` of any run."""
    return [
        f"{run.name}: {problem}"
        for run in RUNS
        if (problem := _problem(run, folder, model, config, settings)) is not None
    ]


def _problem(
    run: FailingRun, folder: Path, model: Path, config: str, settings: Sequence[str]
) -> str | None:
    (own := folder / run.name).mkdir()
    with ExitStack() as opened:
        (server,) = start_servers("embedded", model, 1, own, opened, ["--max-model-len", "64"])
        record = {"does": run.does, "folder": str(own), "pids": [server.process.pid], "answer": "1"}
        data = own / "prompts.jsonl"
        records = [{"prompt": f"{n:06}", **record} for n in range(run.num_groups * run.num_steps)]
        data.write_text("".join(json.dumps(each) + "\n" for each in records))
        wild = f"{{name: wild, file: {environment.__file__}, max_rollouts: {MOST_OPEN}}}"
        attempt = Attempt(
            0,
            config,
            [
                *settings,
                f"run.output_dir={own / 'run'}",
                f"model.path={model}",
                f"data.files=[{data}]",
                f"inference.endpoints=[{server.url}]",
                f"inference.max_outage_s={OUTAGE_S}",
                "rewards=[]",
                f"environments=[{wild}]",
                "rollout.num_generations=4",
                "rollout.max_tokens=4",
                f"trainer.batch_size={run.num_groups}",
                f"trainer.max_steps={run.num_steps}",
                "trainer.max_tokens_per_micro_batch=2048",
            ],
            own / "log",
            0,
        )
        until_s = time.monotonic() + LIMIT_S
        try:
            while attempt.launcher.poll() is None:
                time.sleep(TICK_S)
                if time.monotonic() > until_s:
                    return f"did not end within {LIMIT_S:g} s"
        finally:
            attempt.kill()
    said, status = attempt.said(), attempt.launcher.returncode
    if status != run.status or run.says not in said:
        return f"ended with status {status}, not {run.status} and {run.says!r}:\n{said[-3000:]}"
    if run.does == "be many":
        return _wrong_number(own / "open", 4 * run.num_groups)
    return None


def _wrong_number(told: Path, num_rollouts: int) -> str | None:
    found = list(map(int, told.read_text().split()))
    if len(found) != num_rollouts or max(found) > MOST_OPEN:
        return f"{len(found)} rollouts, up to {max(found)} at a time, of {num_rollouts}"
    return None
