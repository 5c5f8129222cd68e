"""``easyrl eval`` against a server that nobody trains."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.random_model import write_prompts, write_random_model
from easyrl.inference_client.launch import EmbeddedServerProcess

ROOT = Path(__file__).resolve().parents[2]
REWARD = """
def reward_func(prompt, texts, token_ids):
    # the second and the fourth sample of every prompt are right
    return [float(i % 2 == 1) for i in range(len(texts))]
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    model = write_random_model(folder / "model", hidden_size=32, num_layers=1)
    write_prompts(folder / "prompts.jsonl", 6, 12)
    (folder / "reward.py").write_text(REWARD)
    with EmbeddedServerProcess(model, ["--num-threads", "1", "--max-model-len", "64"]) as server:
        yield folder, server.url


def evaluate(served, *options: str) -> subprocess.CompletedProcess:
    folder, url = served
    command = [
        *(sys.executable, "-m", "easyrl", "eval", "benchmarks/overlap.yaml"),
        *(f"model.path={folder / 'model'}", f"data.files=[{folder / 'prompts.jsonl'}]"),
        *(f"inference.endpoints=[{url}]", f"rewards=[{{file: {folder / 'reward.py'}}}]"),
        *(f"evaluation.data.files=[{folder / 'prompts.jsonl'}]", "evaluation.num_samples=4"),
        *("evaluation.data.max_prompt_tokens=16", "evaluation.pass_at=[1,4]", *options),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_figures_are_those_of_the_rewards(served):
    result = evaluate(served, "evaluation.sampling.max_tokens=8")
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "num_prompts": 6,
        "eval/accuracy": 0.5,
        "eval/avg@4": 0.5,
        "eval/pass@1": 0.5,
        "eval/pass@4": 1.0,
    }


def test_too_long_samples_are_refused_with_the_key(served):
    result = evaluate(served, "evaluation.sampling.max_tokens=64")
    assert result.returncode == 2
    assert (
        "evaluation.data.max_prompt_tokens + evaluation.sampling.max_tokens is 80" in result.stderr
    )
    assert "Traceback" not in result.stderr
