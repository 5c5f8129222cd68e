"""A tool loop on two data-parallel ranks: counted, on-policy, and the weights that one rank makes.

In strict mode with a batch-invariant server all runs are sampled alike, as the seeds say; what is
left are sums that two ranks take in another order.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from easyrl.demo.tools.task import ARGUMENT, ERROR, NO_TOOL, TOOL, tool_call
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.ledger.recorded_run import RecordedRun
from easyrl.metrics.trackers import read_metrics
from easyrl.schema import Completion
from tests.end_to_end.test_example_environments import Pieces, build, weights
from tests.end_to_end.trainer_run import ROOT, run_to_end, run_trainer, trainer_command
from tests.golden.comparison import far_weights, sketch

pytestmark = pytest.mark.runs

STEPS, BATCH, SAMPLES = 2, 4, 4
NUM_EPISODES = STEPS * BATCH * SAMPLES
SERVER = ["--batch-invariant", "--num-threads", "1", "--max-model-len", "256"]
FIGURES = ("loss", "grad_norm", "reward/mean", "tokens/response")
# Of fp32 sums that are taken in another order. Measured: figures within 7e-7, weights within 6e-8
# of a tensor's norm, of which the run moves them by 0.03. With such an epsilon Adam's steps are as
# large as the gradients, so that these are compared: no rounding of a small one becomes a step.
FIGURES_TOLERANCE, WEIGHTS_TOLERANCE = 1e-5, 1e-6
STEP = ("trainer.learning_rate=0.1", "trainer.adam_eps=1.0")


def sums(rng: random.Random) -> Iterator[Pieces]:
    """A call of a random operation, one in five of a tool that there is not, and a digit."""
    while True:
        a, b, operator = rng.randrange(1, 100), rng.randrange(1, 100), rng.choice("+-*")
        name = NO_TOOL if rng.random() < 0.2 else TOOL
        value = {"+": a + b, "-": a - b, "*": a * b}[operator]
        yield [
            (f"<|system|>{TOOL}({ARGUMENT})<|end|><|user|>{a}*{b}<|end|><|assistant|>", False),
            (f"{tool_call(name, f'{a}{operator}{b}')}<|end|>", True),
            (f"<|tool|>{value if name == TOOL else ERROR}<|end|><|assistant|>", False),
            (f"{rng.randrange(10)}<|end|>", True),
        ]


def play(folder: Path, model: Path, url: str, num_ranks: int) -> Path:
    """A run's folder; ``num_ranks`` 0: without the launcher."""
    run_dir = folder / f"ranks{num_ranks}"
    tools = f"{{file: {ROOT}/examples/calculator_tool/calculator.py, functions: [calculate]}}"
    options = [
        *("rewards=[]", "run.determinism=strict", "run.name=tools"),
        f"environments=[{{name: sums, tools: [{tools}], rewards: [{{file: {folder / 'odd.py'}}}],"
        " max_turns: 4}]",
        *("data.apply_chat_template=true", "data.max_prompt_tokens=64"),
        *(f"trainer.batch_size={BATCH}", f"trainer.max_steps={STEPS}", "trainer.zero_stage=2"),
        *STEP,
        *(f"rollout.num_generations={SAMPLES}", "rollout.max_tokens=48"),
        "checkpoint.export_at_end=true",
    ]
    command = trainer_command(
        run_dir, model, folder / "prompts.jsonl", [url], *options, num_ranks=num_ranks
    )
    run_trainer(command)
    return run_dir


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of one rank, and of two."""
    folder = tmp_path_factory.mktemp("tools")
    build(folder / "model", sums, num_steps=80, batch_size=8)
    rng = random.Random(0)
    problems = [f"{rng.randrange(1, 100)}*{rng.randrange(1, 100)}" for _ in range(STEPS * BATCH)]
    records = [json.dumps({"prompt": problem, "answer": "-"}) for problem in problems]
    (folder / "prompts.jsonl").write_text("\n".join(records) + "\n")
    (folder / "odd.py").write_text(
        "def reward_func(prompt, texts, token_ids):\n"
        "    return [float(text[-1:] in set('13579')) for text in texts]\n"
    )
    with EmbeddedServerProcess(folder / "model", SERVER) as server:
        return [play(folder, folder / "model", server.url, num_ranks) for num_ranks in (0, 2)]


def episodes_of(run_dir: Path) -> dict[tuple[int, int, int], Completion]:
    """All that were trained, by epoch, prompt and sample."""
    run = RecordedRun(run_dir)
    return {
        (*key, number): completion
        for v in range(run.num_batches)
        for key, group in run.groups(v, frozenset(g.key for g in run.batch(v).groups)).items()
        for number, completion in enumerate(group.completions)
    }


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [m for m in read_metrics(run_dir / "metrics.jsonl") if m["step"] > 0]


def test_both_are_on_policy_and_counted(runs: list[Path]) -> None:
    for run_dir in runs:
        played = episodes_of(run_dir)
        assert len(played) == NUM_EPISODES
        turns, said = 0, Counter[str]()
        for completion in played.values():
            assert completion.episode is not None and completion.episode.failure is None
            turns += len(completion.episode.turns)
            said.update(completion.episode.components)
            assert completion.episode.num_branches == 1  # each turn continues the one before
        assert turns > NUM_EPISODES and said["tool_calls"] > said["tool_errors"] > 0
        result = run_to_end([sys.executable, "-m", "easyrl", "verify", str(run_dir)])
        assert result.returncode == 0 and f"on-policy: {STEPS} batches" in result.stdout
        counted = re.search(r"(\d+) episodes of (\d+) turns in (\d+) branches", result.stdout)
        assert counted, result.stdout
        assert tuple(map(int, counted.groups())) == (NUM_EPISODES, turns, NUM_EPISODES)
        # of all ranks: what began before a report may end behind it
        told = steps_of(run_dir)
        assert sum(m["environment/sums/episodes"] for m in told) == NUM_EPISODES
        assert all(m["environment/sums/branches"] == 1.0 for m in told)


def test_two_ranks_play_and_train_what_one_does(runs: list[Path]) -> None:
    one, two = runs
    ranks = {(file.stem, file.stat().st_size > 0) for file in (two / "journal").rglob("*.turns")}
    assert {name.rpartition("-")[2] for name, has_turns in ranks if has_turns} == {"rank0", "rank1"}
    alone, shared = episodes_of(one), episodes_of(two)
    assert alone.keys() == shared.keys()
    for key, completion in alone.items():
        assert (completion.token_ids == shared[key].token_ids).all(), key
        assert completion.episode is not None and shared[key].episode is not None
        assert completion.episode.reward == shared[key].episode.reward
    for ours, theirs in zip(steps_of(two), steps_of(one), strict=True):
        for name in FIGURES:
            assert ours[name] == pytest.approx(theirs[name], rel=FIGURES_TOLERANCE), name
        assert ours["grad_norm"] > 0 and 0 < ours["reward/mean"] < 1
    before, of_one, of_two = (
        sketch(weights(folder / "model").items()) for folder in (one.parent, one, two)
    )
    assert not far_weights(of_two, of_one, tolerance=WEIGHTS_TOLERANCE)
    assert far_weights(of_one, before, tolerance=WEIGHTS_TOLERANCE)
