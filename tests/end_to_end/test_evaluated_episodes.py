"""Held-out prompts of a run with environments: played as its own are, and counted alike."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.trainer_run import run_to_end, run_trainer
from tests.golden.whole_run import (
    BATCH,
    NUM_BATCHES,
    PROMPT_TOKENS,
    Inputs,
    servers,
    strict_command,
)

pytestmark = [pytest.mark.runs, pytest.mark.slow]

NUM_HELD_OUT, NUM_SAMPLES, NUM_GENERATIONS = 12, 4, 4
FIGURES = ("eval/accuracy", "eval/avg@4", "eval/pass@1", "eval/pass@4", "eval/excluded")
# Right is an episode whose second answer begins with a token of the first; every fourth prompt's
# fails behind its first turn, and nothing is right of it.
ROLLOUT = """
from easyrl.environments.client import Client


async def rollout(client: Client, prompt):
    first = await client.generate([5, 6, 7, 8 + prompt.index], max_tokens=6)
    if prompt.index % 4 == 3 and "held" in prompt.metadata:
        raise RuntimeError("it breaks")
    second = await client.generate([5, 6, 7, 8 + prompt.index, *first.token_ids, 9], max_tokens=6)
    return {"reward": float(second.token_ids[0] in first.token_ids), "components": {"one": 1.0}}
"""


def evaluated(command: list[str], *options: str) -> dict[str, float]:
    """What ``easyrl eval`` says of what the endpoint serves now."""
    place = command.index("easyrl.train")
    said = run_trainer([sys.executable, "-m", "easyrl", "eval", *command[place + 1 :], *options])
    return json.loads(said.splitlines()[-1])


def test_a_version_is_evaluated_beside_its_batch_with_the_episodes_it_has_alone(tmp_path: Path):
    inputs = Inputs(tmp_path / "inputs")
    plain = write_prompts(tmp_path / "plain.jsonl", NUM_HELD_OUT, PROMPT_TOKENS + 1, seed=1)
    held_out = tmp_path / "held-out.jsonl"
    records = [json.loads(line) | {"held": True} for line in plain.read_text().splitlines()]
    held_out.write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "game.py").write_text(ROLLOUT)
    data = f"files: [{held_out}], apply_chat_template: false, max_prompt_tokens: 16"
    options = [
        *("rewards=[]", f"environments=[{{name: game, file: {tmp_path / 'game.py'}}}]"),
        f"evaluation={{data: {{{data}}}, num_samples: {NUM_SAMPLES}, pass_at: [1, 4],"
        " every_steps: 1, sampling: {max_tokens: 12}}",
    ]
    run_dir, texts = tmp_path / "run", tmp_path / "texts.jsonl.gz"
    with servers(inputs.model, 1) as (server,):
        command = strict_command(run_dir, inputs, [server.url], *options)
        before = evaluated(command, "--keep-texts", str(texts))
        run_trainer(command)
        after = evaluated(command)
    assert before.pop("num_prompts") == NUM_HELD_OUT
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(NUM_BATCHES + 1))
    for alone, beside in ((before, metrics[0]), (after, metrics[-1])):
        assert {name: alone[name] for name in FIGURES} == {name: beside[name] for name in FIGURES}
        assert alone["eval/avg@4"] == alone["eval/accuracy"] == alone["eval/pass@1"]
    assert len({m["eval/accuracy"] for m in metrics}) > 1  # there is something to compare
    # of episodes of held-out prompts there are figures of their own, also alone
    held_out, trained = "environment/game/held_out/episodes", "environment/game/episodes"
    num_played = NUM_HELD_OUT * NUM_SAMPLES
    assert [m[held_out] for m in [before, *metrics]] == [num_played] * (NUM_BATCHES + 2)
    assert sum(m[trained] for m in metrics[1:]) == NUM_BATCHES * BATCH * NUM_GENERATIONS
    assert trained not in before

    with gzip.open(texts) as file:
        kept = [json.loads(line) for line in file]
    assert sorted(each["index"] for each in kept) == list(range(NUM_HELD_OUT))
    num_right = {each["index"]: 0 for each in kept}
    for each in kept:
        assert len(each["responses"]) == NUM_SAMPLES
        for response in each["responses"]:
            breaks = each["index"] % 4 == 3
            fewest, most = (1, 6) if breaks else (2, 12)  # of one turn, or two
            assert fewest <= response["num_tokens"] <= most
            assert response["reward"] in ({0.0} if breaks else {0.0, 1.0})
            assert response["components"].keys() == (
                set() if breaks else {"game/reward", "game/one"}
            )
            num_right[each["index"]] += response["reward"] == 1.0
    counts = num_right.values()
    assert before["eval/accuracy"] == sum(counts) / (NUM_HELD_OUT * NUM_SAMPLES)
    assert before["eval/pass@4"] == sum(count > 0 for count in counts) / NUM_HELD_OUT
    assert 0 < before["eval/accuracy"] < before["eval/pass@4"] < 1
    verified = run_to_end([sys.executable, "-m", "easyrl", "verify", str(run_dir)])
    assert verified.returncode == 0 and "on-policy" in verified.stdout, verified.stdout
