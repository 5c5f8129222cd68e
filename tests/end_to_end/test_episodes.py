"""A run whose samples are episodes: played, trained, on-policy, and counted by verify."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.ledger.journal.codec import GroupRecord, decode_any
from easyrl.ledger.journal.record_file import read_records
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.trainer_run import run_trainer, trainer_command

pytestmark = pytest.mark.runs

STEPS, BATCH, SAMPLES = 2, 2, 3
# Two requests by token ids, the second behind the first one's answer, and a chat of two turns.
ROLLOUT = """
from easyrl.environments.client import Client


async def rollout(client: Client, prompt):
    first = await client.generate([5, 6, 7], max_tokens=6)
    second = await client.generate([5, 6, 7, *first.token_ids, 8, 9], max_tokens=6)
    messages = [{"role": "user", "content": prompt.text}]
    reply = await client.chat(messages, max_tokens=6)
    messages += [reply.message, {"role": "user", "content": "12"}]
    await client.chat(messages, max_tokens=6)
    return float(len(second.token_ids))
"""


def test_episodes_are_played_trained_and_verified(served: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    prompts = write_prompts(tmp_path / "prompts.jsonl", BATCH * STEPS, 6)
    (tmp_path / "game.py").write_text(ROLLOUT)
    options = [
        "rewards=[]",
        f"environments=[{{name: game, file: {tmp_path / 'game.py'}}}]",
        *(f"trainer.batch_size={BATCH}", f"trainer.max_steps={STEPS}"),
        *(f"rollout.num_generations={SAMPLES}", "rollout.max_tokens=8"),
    ]
    run_trainer(trainer_command(run_dir, served.model, prompts, [served.url], *options))

    steps = [m for m in read_metrics(run_dir / "metrics.jsonl") if m["step"] > 0]
    assert [m["step"] for m in steps] == [1, 2]
    assert all(0 < m["reward/mean"] <= 6 for m in steps)
    groups = [
        record
        for file in sorted((run_dir / "journal").rglob("*.journal"))
        for _, payload in list(read_records(file))[1:]
        if isinstance(record := decode_any(payload), GroupRecord)
    ]
    assert len(groups) == STEPS * BATCH
    for group in groups:
        assert len(group.completions) == SAMPLES
        for completion in group.completions:
            assert completion.episode is not None
            parents = [turn.parent for turn in completion.episode.turns]
            assert parents == [None, 0, None, 2]  # both continue what was sampled, exactly
    said = subprocess.run(
        [sys.executable, "-m", "easyrl", "verify", str(run_dir)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "on-policy: 2 batches" in said
    assert f"{STEPS * BATCH * SAMPLES} episodes of {4 * STEPS * BATCH * SAMPLES} turns" in said
