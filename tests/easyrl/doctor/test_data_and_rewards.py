"""Checks of data, arithmetic and rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easyrl.build.doctor import Diagnosis
from easyrl.config import Config
from easyrl.doctor.batches import batch_findings, data_finding
from easyrl.doctor.finding import Finding
from easyrl.doctor.given_responses import known_answers
from easyrl.schema import Prompt
from tests.easyrl.doctor.parts import config, write_records


def prompt(index: int, num_tokens: int, answer: str | None = None) -> Prompt:
    return Prompt(index, np.arange(num_tokens, dtype=np.int32), f"question {index}", answer)


def test_data(model: Path) -> None:
    found = data_finding(config(model), [prompt(i, 3 + i) for i in range(8)])
    assert found.verdict == "ok" and found.seen == "8 prompts, the longest of 10 tokens"


def test_records_that_are_left_out(model: Path) -> None:
    few, most = [prompt(i, 3) for i in range(6)], [prompt(i, 3) for i in range(2)]
    some = data_finding(config(model), few)
    assert some.verdict == "ok" and "2 of 8 records are left out" in some.seen
    nearly_all = data_finding(config(model), most)
    assert nearly_all.verdict == "failed" and "data.max_prompt_tokens=16" in nearly_all.remedy
    data = {"files": [str(model.parent / "train.jsonl")], "max_records": 2}
    assert "left out" not in data_finding(config(model, data=data), most).seen


@pytest.mark.parametrize(
    ("batch_size", "max_steps", "verdict"), [(8, None, "ok"), (9, None, "failed"), (9, 5, "ok")]
)
def test_batches(model: Path, batch_size: int, max_steps: int | None, verdict: str) -> None:
    trainer = {"zero_stage": 0, "batch_size": batch_size, "max_steps": max_steps}
    (found,) = batch_findings(config(model, trainer=trainer), 8, ["said", "more"])
    assert found.verdict == verdict and found.seen.startswith("said; more")
    assert ("trainer.batch_size" in found.remedy) == (verdict == "failed")


def test_known_answers() -> None:
    prompts = [prompt(0, 1), prompt(1, 1, "4"), prompt(2, 1, "4"), prompt(3, 1, "5")]
    known = known_answers(prompts, lambda text: [ord(c) for c in text], 0, most=2)
    assert [each.prompt.index for each in known] == [1, 2]

    def texts(completions: Any) -> list[str]:
        assert all(c.token_ids[-1] == 0 for c in completions)  # each has ended
        return ["".join(map(chr, c.token_ids[:-1])) for c in completions]

    assert texts(known[0].right)[:2] == ["4", "\\boxed{4}"]
    assert texts(known[0].wrong)[:2] == ["5", "\\boxed{5}"]
    assert known_answers(prompts[:3], lambda _: [1], 0, most=2) == []


REWARDS = """
def right(prompt, texts, token_ids):
    return [float(prompt.answer in text) for text in texts]

def turned(prompt, texts, token_ids):
    return [float(prompt.answer not in text) for text in texts]

def length(prompt, texts, token_ids):
    return [float(len(prompt.text)) for text in texts]

def raising(prompt, texts, token_ids):
    if prompt.answer in texts[0]:
        raise ValueError("the answer is there")
    return [0.0 for text in texts]
"""


def of(model: Path, tmp_path: Path, *rewards: dict[str, Any], **sections: Any) -> Finding:
    """What the rewards' check finds."""
    file = tmp_path / "reward.py"
    file.write_text(REWARDS)
    made = [r if "name" in r else r | {"file": str(file)} for r in rewards]
    checked: Config = config(model, rewards=made, **sections)
    diagnosis = Diagnosis(checked, lambda _: checked)
    found = [f for f in diagnosis.findings() if f.name in ("data", "rewards")]
    assert found[0].verdict == "ok", found[0]
    return found[-1]


def test_a_reward_that_prefers_the_answer(model: Path, tmp_path: Path) -> None:
    found = of(model, tmp_path, {"function": "right"}, {"name": "exact", "weight": 0.5})
    # "0" and "1" are in other answers' texts, too: of those the wrong one's forms may be right
    assert found.verdict == "ok" and "gets 1.5" in found.seen


def test_a_reward_that_is_turned_round(model: Path, tmp_path: Path) -> None:
    found = of(model, tmp_path, {"function": "turned"})
    assert found.verdict == "failed" and "data.fields.answer" in found.remedy


def test_a_reward_that_does_not_depend_on_the_answer(model: Path, tmp_path: Path) -> None:
    found = of(model, tmp_path, {"function": "length"})
    assert found.verdict == "ok" and "does not depend on the answer alone" in found.seen


def test_a_reward_that_raises_on_an_answer(model: Path, tmp_path: Path) -> None:
    """Which a trial call on the prompt's own tokens does not show."""
    found = of(model, tmp_path, {"function": "raising"})
    assert found.verdict == "failed" and "the answer is there" in found.seen
    zero = {"on_reward_error": "zero", "num_workers": 1}
    found = of(model, tmp_path, {"function": "raising"}, scoring=zero)
    assert found.verdict == "failed" and "scoring.on_reward_error" in found.remedy


def test_a_comparison_that_no_answer_passes(tmp_path: Path, model: Path) -> None:
    """An answer with its working: the pattern that would find it is missing."""
    file = tmp_path / "train.jsonl"
    records = [{"prompt": f"{i}+0=", "answer": f"{i}+0={i} ;{i}"} for i in range(8)]
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    reward = {"name": "exact", "kwargs": {"pattern": ";(.*)"}}
    wrong = of(model, tmp_path, reward, data={"files": [str(file)], "max_prompt_tokens": 16})
    assert wrong.verdict == "failed" and "data.answer_pattern" in wrong.remedy
    data = {"files": [str(file)], "max_prompt_tokens": 16, "answer_pattern": ";(.*)"}
    assert of(model, tmp_path, {"name": "exact"}, data=data).verdict == "ok"


def test_records_without_answers(model: Path, tmp_path: Path) -> None:
    data = {
        "files": [str(write_records(tmp_path / "model"))],
        "fields": {"answer": None},
        "max_prompt_tokens": 16,
    }
    found = of(model, tmp_path, {"function": "length"}, data=data)
    assert found.verdict == "not checked" and "data.fields.answer" in found.seen
