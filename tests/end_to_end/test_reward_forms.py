"""Reward functions in the forms of TRL, of verl and our own, each trained one step, unchanged.

All of them are rewards of the same step, each with a weight of its own: from a file that ``easyrl
train`` is given, and as objects of a script that calls ``train_policy``. What each said of each
response is compared with a call by hand on the text that was trained.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from easyrl.metrics.trackers import read_metrics
from easyrl.schema import Prompt
from tests.easyrl.rewards.reward_forms import FORMS, KWARGS, SOURCE, Responses, direct
from tests.end_to_end.trainer_run import CONFIG, ROOT, trainer_environment

pytestmark = pytest.mark.runs

# but for the one that never has an opinion, which a trial call refuses as a forgotten return
TRAINED = [name for name in FORMS if name != "trl_of_none"]
RECORDS = [
    {
        "prompt": f"{a} + {b} =",
        "answer": a + b,
        "level": a + 1,
        "data_source": "sums" * a or "none",
        "extra_info": {"split": "train", "index": 10 * a + b},
    }
    for a, b in ((0, 1), (1, 2), (3, 4), (2, 5))
]
NUM_GENERATIONS = 4
SETTINGS: dict[str, Any] = {
    "rollout.num_generations": NUM_GENERATIONS,
    "rollout.max_tokens": 24,
    "data.max_prompt_tokens": 32,
    "trainer.batch_size": len(RECORDS),
    "trainer.max_steps": 1,
    "trainer.zero_stage": 0,
    "samples.per_step": len(RECORDS),
    "checkpoint.export_at_end": False,
}
WEIGHTS = {name: 1.0 / (2 + number) for number, name in enumerate(TRAINED)}
LABELS = {"trl_object": "Judge"}  # of an object of a script, which has no name of its own
SCRIPT = (
    SOURCE
    + """
import json, sys
from easyrl import train_policy

asked = json.loads(sys.argv[1])
functions = [globals()[name] for name in asked.pop("functions")]
train_policy(asked.pop("model"), asked.pop("prompts"), functions, **asked)
"""
)


def by_command(folder: Path, served: Any) -> Path:
    """``easyrl train`` with a file that names the functions of another."""
    (folder / "forms.py").write_text(SOURCE)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    tree = OmegaConf.load(ROOT / CONFIG)
    settings = {
        **SETTINGS,
        "run.output_dir": str(folder / "run"),
        "model.path": str(served.model),
        "data.files": [str(prompts)],
        "inference.endpoints": [served.url],
        "rewards": [
            {
                "file": str(folder / "forms.py"),
                "function": name,
                "weight": WEIGHTS[name],
                "kwargs": KWARGS.get(name, {}),
            }
            for name in TRAINED
        ],
    }
    for key, value in settings.items():
        OmegaConf.update(tree, key, value)
    OmegaConf.save(tree, folder / "config.yaml")
    ended([sys.executable, "-m", "easyrl", "train", str(folder / "config.yaml")], folder)
    return folder / "run"


def by_script(folder: Path, served: Any) -> Path:
    """``train_policy`` with the functions that the script itself defines."""
    (folder / "script.py").write_text(SCRIPT)
    settings = {**SETTINGS, "run.console": False}
    for number, name in enumerate(TRAINED):
        settings[f"rewards[{number}].weight"] = WEIGHTS[name]
        if name in KWARGS:
            settings[f"rewards[{number}].kwargs"] = KWARGS[name]
    asked = {
        "functions": TRAINED,
        "model": str(served.model),
        "prompts": RECORDS,
        "output_dir": "run",
        "endpoints": [served.url],
        "settings": settings,
    }
    ended([sys.executable, "script.py", json.dumps(asked)], folder)
    return folder / "run"


def ended(command: list[str], folder: Path) -> None:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        command,
        cwd=folder,
        env=trainer_environment(PYTHONPATH=paths),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def spoken(name: str, value: Any) -> dict[str, float]:
    """What a sample has of a value that a reward returned for it; nothing of no opinion."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return {name: float(value)}
    numbers = {k: float(v) for k, v in value.items() if not isinstance(v, str)}
    score = numbers.pop("score")
    return {name: score} | {f"{name}/{part}": number for part, number in numbers.items()}


@pytest.mark.parametrize("started", [by_command, by_script])
def test_each_form_trains_a_step_and_says_what_it_says_by_hand(started, served, tmp_path):
    run_dir = started(tmp_path, served)
    (metrics,) = [m for m in read_metrics(run_dir / "metrics.jsonl") if m["step"] == 1]
    assert metrics["reward/failures"] == 0 and metrics["step_skipped"] == 0
    assert metrics["grad_norm"] > 0
    (file,) = (run_dir / "samples").iterdir()
    groups = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert sorted(group["index"] for group in groups) == list(range(len(RECORDS)))
    tokenizer = AutoTokenizer.from_pretrained(served.model)
    num_opinions = dict.fromkeys(TRAINED, 0)
    for group in groups:
        record, responses = RECORDS[group["index"]], group["responses"]
        token_ids = [response["token_ids"] for response in responses]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids]
        metadata = {k: v for k, v in record.items() if k not in ("prompt", "answer")}
        asked = Prompt(
            0, np.zeros(1, np.int32), record["prompt"], str(record["answer"]), metadata=metadata
        )
        said = Responses(record, asked, texts, token_ids)
        expected: list[dict[str, float]] = [{} for _ in responses]
        rewards = np.zeros(len(responses))
        for name in TRAINED:
            values = direct(name, said)
            label = LABELS.get(name, name) if started is by_script else name
            for number, value in enumerate(values):
                parts = spoken(label, value)
                expected[number] |= parts
                rewards[number] += WEIGHTS[name] * parts.get(label, 0.0)
                num_opinions[name] += value is not None
        assert len(responses) == NUM_GENERATIONS
        assert [response["components"] for response in responses] == expected
        assert [response["reward"] for response in responses] == pytest.approx(rewards, rel=1e-6)
    silent = {name for name, number in num_opinions.items() if not number}
    assert silent <= {"trl_of_some"}  # which speaks of right answers alone
    assert len(num_opinions.keys() - silent) >= 12
