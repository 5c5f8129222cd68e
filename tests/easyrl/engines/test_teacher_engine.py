"""Distillation through ``DeepSpeedEngine``, ZeRO 0 to 3, alone and on two ranks (CPU, gloo).

One launch runs all cases in turn (``teacher_worker.py``); the tests read what was measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from easyrl.runtime.machine import free_port
from tests.easyrl.engines.test_deepspeed_engine import ROOT, run
from tests.easyrl.models.teacher_cases import prepare

pytestmark = pytest.mark.runs
Cases = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "two-ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Cases]:
    """By rank and case, what was measured."""
    folder = prepare(tmp_path_factory.mktemp("teacher"))
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    worker = [str(ROOT / "tests/easyrl/engines/teacher_worker.py"), str(folder)]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2"]
    launcher += ["--master_port", str(free_port())]
    output = run([sys.executable, *worker] if request.param == 1 else [*launcher, *worker])
    files = [folder / f"results-rank{rank}.json" for rank in range(request.param)]
    assert all(file.exists() for file in files), output[-6000:]
    found = [json.loads(file.read_text()) for file in files]
    for rank in found:
        assert len(rank) == 14
        for name, case in rank.items():
            assert "error" not in case, f"{name}: {case['error']}"
    return found


def test_gradient_is_the_dense_one(ranks: list[Cases]) -> None:
    """Against fp64 models that run each sequence alone, a larger and a smaller teacher."""
    for rank in ranks:
        for name, case in rank.items():
            assert not case["skipped"], name
            tolerance = 1e-5 if "fp32" in name else 0.1
            assert case["gradient"] < tolerance and case["norm"] < tolerance, (name, case)


def test_the_divergence_that_is_reported_is_the_dense_one(ranks: list[Cases]) -> None:
    for name, case in ranks[0].items():
        reported = sum(rank[name]["kl"] for rank in ranks)
        assert reported == pytest.approx(case["expected_kl"], rel=1e-5 if "fp32" in name else 0.05)


def test_the_teacher_is_in_no_checkpoint_and_is_not_trained(ranks: list[Cases]) -> None:
    for rank in ranks:
        for name, case in rank.items():
            assert case["of_policy"] and case["teacher_is_frozen"], name


def test_scores_of_sampled_tokens_may_be_taken_ahead(ranks: list[Cases]) -> None:
    for rank in ranks:
        for name, case in rank.items():
            is_sampled = "sampled" in name
            alone = len(ranks) == 1 or not name.startswith("3/")
            assert case["has_frozen"] == is_sampled, name
            assert case["looks_ahead"] == (is_sampled and alone), name
