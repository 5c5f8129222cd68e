"""A model by its Hub id and prompts of ``datasets``, from Python and from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.parts.random_model import write_random_model
from easyrl.metrics.trackers import read_metrics
from tests.easyrl.hub.hub_cache import COMMIT, cache_model
from tests.end_to_end.trainer_run import ROOT

pytestmark = pytest.mark.slow
REPO = "some-lab/tiny-model"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SETTINGS = {
    "trainer.batch_size": 3,
    "trainer.max_steps": 2,
    "rollout.max_tokens": 9,
    "rollout.num_generations": 2,
    "data.max_prompt_tokens": 32,
    "data.chat_template": "template.jinja",
}
SCRIPT = f"""
from datasets import Dataset
from easyrl import train_policy

def asked(prompts, completions, answer, **columns):
    assert [p[-1]["content"] for p in prompts] == [f"{{a}}+1" for a in columns["a"]], prompts
    assert all(c[0]["role"] == "assistant" for c in completions), completions
    return [float(int(right) == a + 1) for a, right in zip(columns["a"], answer)]

def row(a):
    return dict(prompt=[dict(role="user", content=f"{{a}}+1")], answer=str(a + 1), a=a)

rows = [row(a) for a in range(6)]
dataset = Dataset.from_list(rows).train_test_split(test_size=1, shuffle=False)
try:
    train_policy({REPO!r}, dataset, asked, output_dir="refused")
except ValueError as error:
    assert "prompts['train']" in str(error), error
train_policy({REPO!r}, dataset["train"], asked, output_dir="python", settings={SETTINGS!r})
stream = dataset["train"].to_iterable_dataset()
try:
    train_policy({REPO!r}, stream, asked, output_dir="refused")
except ValueError as error:
    assert "data.max_records" in str(error), error
"""
REWARD = """
def reward(prompt, texts, token_ids):
    assert prompt.location.startswith("prompts:train row"), prompt.location
    return [float(prompt.answer == str(prompt.metadata["a"] + 1)) for _ in texts]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    model = write_random_model(folder / "random", hidden_size=32, num_layers=1)
    cache_model(folder / "home", REPO, model)
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts").mkdir()
    rows = [{"question": f"{a}+1", "answer": str(a + 1), "a": a} for a in range(6)]
    lines = "\n".join(json.dumps(row) for row in rows)
    (folder / "prompts" / "train.jsonl").write_text(lines)
    return folder


def ended(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_from_python(folder: Path) -> None:
    """The split of a dataset of chats; the reward sees them as chats, with its columns."""
    (folder / "script.py").write_text(SCRIPT)
    result = ended(folder, "script.py")
    assert result.returncode == 0, result.stderr[-3000:]
    metrics = read_metrics(folder / "python" / "metrics.jsonl")[1:]
    assert [m["reward/mean"] for m in metrics] == [1.0, 1.0]
    assert not (folder / "refused").exists()
    assert COMMIT in (folder / "python" / "config.yaml").read_text()  # what it was made of


def test_from_the_command_line(folder: Path) -> None:
    config = {
        "run": {"output_dir": "cli"},
        "model": {"path": REPO, "dtype": "fp32"},
        "data": {"dataset": "prompts", "fields": {"prompt": "question"}},
        "inference": {"launch": {"engine": "embedded"}},
        "rewards": [{"file": "reward.py", "function": "reward"}],
        "recipe": {"name": "grpo", "kl_coef": 0.0},
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    result = ended(folder, "-m", "easyrl", "train", "config.yaml", *settings)
    assert result.returncode == 0, result.stderr[-3000:]
    metrics = read_metrics(folder / "cli" / "metrics.jsonl")[1:]
    assert [m["reward/mean"] for m in metrics] == [1.0, 1.0]
    missing = ended(folder, "-m", "easyrl", "train", "config.yaml", "model.path=some-lab/other")
    assert missing.returncode == 2 and "Traceback" not in missing.stderr
    assert "model.path: some-lab/other is not a directory here" in missing.stderr
    assert "hf download some-lab/other --local-dir models/other" in missing.stderr
