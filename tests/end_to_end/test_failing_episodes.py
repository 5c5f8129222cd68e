"""Rollouts that fail are left out of their groups; a run of them alone ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.ledger.journal.codec import GroupRecord, decode_any, to_completion
from easyrl.ledger.journal.record_file import read_records
from easyrl.metrics.trackers import read_metrics
from easyrl.schema import NEEDS_CHANGE
from tests.end_to_end.trainer_run import run_trainer, trainer_command

pytestmark = pytest.mark.runs

STEPS, BATCH, SAMPLES = 2, 2, 6
# by seed, a third of the rollouts fails before its first turn, and a third behind it
ROLLOUT = """
from easyrl.environments.client import Client


async def rollout(client: Client, prompt):
    if prompt.seed // 7 % 3 == 0:
        raise KeyError("no board")
    made = await client.generate([5, 6, 7], max_tokens=6)
    if prompt.seed // 7 % 3 == 1:
        raise ValueError("no such move")
    return float(made.token_ids[0] % 7)
"""


def options(folder: Path, source: str, **environment: str) -> list[str]:
    (folder / "game.py").write_text(source)
    more = "".join(f", {key}: {value}" for key, value in environment.items())
    return [
        "rewards=[]",
        f"environments=[{{name: game, file: {folder / 'game.py'}{more}}}]",
        *(f"trainer.batch_size={BATCH}", f"trainer.max_steps={STEPS}"),
        *(f"rollout.num_generations={SAMPLES}", "rollout.max_tokens=8"),
    ]


def groups_of(run_dir: Path) -> list[GroupRecord]:
    return [
        record
        for file in sorted((run_dir / "journal").rglob("*.journal"))
        for _, payload in list(read_records(file))[1:]
        if isinstance(record := decode_any(payload), GroupRecord)
    ]


def test_what_fails_is_not_trained(served: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    prompts = write_prompts(tmp_path / "prompts.jsonl", 4 * BATCH * STEPS, 6)
    own = options(tmp_path, ROLLOUT)
    run_trainer(trainer_command(run_dir, served.model, prompts, [served.url], *own))

    steps = [m for m in read_metrics(run_dir / "metrics.jsonl") if m["step"] > 0]
    groups = [group for group in groups_of(run_dir) if not group.refused]
    assert len(steps) == STEPS and len(groups) == STEPS * BATCH
    pairs = [
        (to_completion(stored), score)
        for group in groups
        for stored, score in zip(group.completions, group.scores, strict=True)
    ]
    failed = [c for c, score in pairs if score.masked]
    trained = [c for c, score in pairs if not score.masked]
    assert {len(c.token_ids) > 0 for c in failed} == {True, False}  # of both kinds
    assert all(c.episode is not None and c.episode.failure for c in failed)
    assert all(c.episode is not None and c.episode.failure is None for c in trained)
    assert sum(m["reward/masked"] for m in steps) == len(failed) > 0
    assert sum(m["batch/denominator"] for m in steps) == sum(c.loss_mask.sum() for c in trained)
    rewards = [score.reward for _, score in pairs if not score.masked]
    mean = sum(rewards) / len(rewards)
    per_step = [BATCH * SAMPLES - m["reward/masked"] for m in steps]
    told = sum(m["reward/mean"] * n for m, n in zip(steps, per_step, strict=True)) / len(rewards)
    assert told == pytest.approx(mean)
    verified = [sys.executable, "-m", "easyrl", "verify", str(run_dir)]
    said = subprocess.run(verified, capture_output=True, text=True, check=True).stdout
    assert f"on-policy: {STEPS} batches" in said


@pytest.mark.parametrize("mode", ["mask", "fail"])
def test_a_run_of_failures_alone_ends(served: Any, tmp_path: Path, mode: str) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 40, 6)
    draw = "prompt.seed // 7 % 3"
    fails = ROLLOUT.replace(f"{draw} == 1", "True").replace(f"{draw} == 0", "False")
    own = options(tmp_path, fails, on_failure=mode)
    command = trainer_command(tmp_path / "run", served.model, prompts, [served.url], *own)
    ended = subprocess.run(command, capture_output=True, text=True)
    said = ended.stdout + ended.stderr
    assert ended.returncode == NEEDS_CHANGE, said
    if mode == "mask":
        assert f"all {BATCH * SAMPLES} rollouts of game in a row failed" in said
    else:
        assert "a rollout failed on prompt" in said and "on_failure=mask leaves" in said
    assert "game.py:10: ValueError: no such move" in said
