"""An evaluation beside its version's batch has the samples that it has alone (batch-invariant)."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.trainer_run import run_trainer
from tests.golden.whole_run import NUM_BATCHES, Inputs, servers, strict_command, train

pytestmark = pytest.mark.runs

FIGURES = ("eval/accuracy", "eval/pass@1", "eval/pass@4", "eval/excluded")


def figures(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in FIGURES}


def alone(folder: Path, inputs: Inputs, url: str, options: list[str]) -> dict[str, float]:
    """Of what the endpoint serves now."""
    command = strict_command(folder / "unused", inputs, [url], *options)
    place = command.index("easyrl.train")
    said = run_trainer([sys.executable, "-m", "easyrl", "eval", *command[place + 1 :]])
    return figures(json.loads(said.splitlines()[-1]))


def test_each_version_is_evaluated_beside_its_batch_with_the_samples_it_has_alone(tmp_path):
    inputs = Inputs(tmp_path)
    held_out = write_prompts(tmp_path / "held-out.jsonl", 24, 12, seed=1)
    data = f"files: [{held_out}], apply_chat_template: false, max_prompt_tokens: 16"
    options = [
        f"evaluation={{data: {{{data}}}, num_samples: 4, pass_at: [1, 4], every_steps: 1,"
        " sampling: {max_tokens: 12}}",
        "inference.max_inflight=16",  # as many as the batch asks for
    ]
    run_dir = tmp_path / "run"
    with servers(inputs.model, 1) as (server,):
        before = alone(tmp_path, inputs, server.url, options)
        train(run_dir, inputs, [server.url], *options)
        after = alone(tmp_path, inputs, server.url, options)
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(NUM_BATCHES + 1))
    assert figures(metrics[0]) == before and figures(metrics[-1]) == after
    assert len({tuple(figures(m).values()) for m in metrics}) > 1  # there is something to compare
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(m["step"], "eval/accuracy" in m) for m in lines] == [
        *((step, is_late) for step in range(NUM_BATCHES) for is_late in (False, True)),
        (NUM_BATCHES, True),
    ]
