"""The demo with a tool: its last line, and that its accuracy is what plain transformers measure."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from easyrl.config.file import load_config
from easyrl.demo.tools.task import ERROR
from tests.end_to_end.trainer_run import ROOT, run_to_end

CALL = re.compile(
    r'<tool_call>\{"name": "(\w+)", "arguments": \{"expression": "(\d+)([*+])(\d+)"\}\}</tool_call>'
)
NUM_RECORDS = 512  # that the configuration evaluates


def demo(run_dir: Path, *options: str, timeout_s: float) -> dict[str, Any]:
    """The last line's object; both of its runs have to be on-policy."""
    command = [sys.executable, "-m", "easyrl.demo", "--task", "tools", "--run-dir", str(run_dir)]
    result = run_to_end([*command, *options], timeout_s)
    assert result.returncode == 0, result.stdout[-3000:]
    said: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    for folder in (run_dir, run_dir / "shuffled"):
        verified = run_to_end([sys.executable, "-m", "easyrl", "verify", str(folder)])
        assert verified.returncode == 0, verified.stdout
        assert f"on-policy: {said['steps']} batches" in verified.stdout, verified.stdout
    assert said["groups_accepted"] == said["groups_drawn"] == 16 * said["steps"]
    return said


@torch.no_grad()
def accuracy(model_dir: Path, records: list[dict[str, str]]) -> float:
    """By one conversation each, sampled, with nothing of EasyRL's own."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    torch.manual_seed(0)

    def answers(texts: list[str]) -> list[str]:
        inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        made = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=20,
            **sampling,
        )
        made = made[:, inputs.input_ids.shape[1] :]
        return list(tokenizer.batch_decode(made, skip_special_tokens=True))

    asked = [
        f"<|system|>calculate(expression)<|end|><|user|>{r['prompt']}<|end|><|assistant|>"
        for r in records
    ]
    last = answers(asked)
    called = {i: match for i, text in enumerate(last) if (match := CALL.fullmatch(text))}
    results = {}
    for i, (name, first, operator, second) in ((i, m.groups()) for i, m in called.items()):
        a, b = int(first), int(second)
        value = str(a * b if operator == "*" else a + b)
        results[i] = value if name == "calculate" else ERROR
    behind = [
        f"{asked[i]}{last[i]}<|end|><|tool|>{result}<|end|><|assistant|>"
        for i, result in results.items()
    ]
    for i, text in zip(results, answers(behind), strict=True):
        last[i] = text
    right = [text == record["answer"] for text, record in zip(last, records, strict=True)]
    return sum(right) / len(right)


@pytest.mark.slow
def test_what_the_demo_measures_is_what_plain_transformers_do(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    said = demo(run_dir, "trainer.max_steps=20", timeout_s=600)
    assert said["steps"] == 20 and said["run_dir"] == str(run_dir)
    assert load_config(ROOT / "configs/demo_tools.yaml").evaluation.data.max_records == NUM_RECORDS
    lines = (run_dir / "data" / "heldout.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[:NUM_RECORDS]]
    measured = {
        "accuracy_before": run_dir / "base_model",
        "accuracy_after": run_dir / "model",
        "accuracy_shuffled": run_dir / "shuffled" / "model",
    }
    # Four standard errors of the difference of two shares, each of 512 draws.
    tolerance = 4 * (2 * 0.25 / NUM_RECORDS) ** 0.5
    for name, folder in measured.items():
        assert said[name] == pytest.approx(accuracy(folder, records), abs=tolerance), name
    assert said["accuracy_after"] > said["accuracy_before"] + 0.1


@pytest.mark.slow
def test_the_demo_learns_to_call_and_its_control_does_not(tmp_path: Path) -> None:
    said = demo(tmp_path / "demo", timeout_s=600)
    assert said["accuracy_after"] >= said["accuracy_before"] + 0.3
    assert said["accuracy_shuffled"] <= said["accuracy_before"] + 0.15
    assert said["warm_start_s"] + said["seconds"] < 240
