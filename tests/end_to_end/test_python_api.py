"""``from easyrl import train_policy`` in a script of a few lines."""

import os
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.random_model import write_random_model
from easyrl import train_policy
from easyrl.metrics.trackers import read_metrics

SCRIPT = """
from easyrl import train_policy

def short_is_good(prompt, texts, token_ids):
    return [1.0 - len(ids) / 24 for ids in token_ids]

if __name__ == "__main__":
    prompts = [f"{a}+{b}" for a in range(3) for b in range(2)]
    settings = {"rollout.max_tokens": 24, "data.max_prompt_tokens": 32, "data.epochs": 2}
    print(train_policy("model", prompts, short_is_good, output_dir="out", settings=settings))
"""


def test_a_script_trains(tmp_path):
    model = write_random_model(tmp_path / "model", hidden_size=32, num_layers=1)
    (tmp_path / "script.py").write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "out/model"
    metrics = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [m["batch/groups"] for m in metrics[1:]] == [6.0, 6.0]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    start = AutoModelForCausalLM.from_pretrained(model)
    assert any(
        (a != b).any() for a, b in zip(trained.parameters(), start.parameters(), strict=True)
    )


def local_reward():
    return lambda prompt, texts, token_ids: [0.0 for _ in texts]


@pytest.mark.parametrize(
    ("prompts", "reward", "message"),
    [
        (["a"], local_reward(), "not a function at the top level of a file"),
        (["a"], len, "not a function at the top level of a file"),
        ([], test_a_script_trains, "prompts: the list is empty"),
    ],
)
def test_what_cannot_be_trained_is_refused(prompts, reward, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_policy("model", prompts, reward, output_dir=tmp_path, endpoints=["http://x"])
