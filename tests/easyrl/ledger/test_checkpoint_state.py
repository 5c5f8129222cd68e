"""The state of real engines, saved and restored in fresh processes, to the bit (CPU, gloo).

Three launches one after another (``checkpoint_worker.py``): two ranks write, one loads and writes
again, two load both. With a lagged old policy, a schedule and Adam; ZeRO 0 to 3, fp32 and bf16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from easyrl.runtime.machine import free_port
from tests.easyrl.engines.engine_cases import prepare
from tests.easyrl.engines.test_deepspeed_engine import ROOT, run
from tests.easyrl.ledger.checkpoint_cases import CASES

pytestmark = pytest.mark.runs

Phase = list[dict[str, Any]]  # by rank


def launch(folder: Path, phase: str, num_ranks: int) -> Phase:
    worker = [str(ROOT / "tests/easyrl/ledger/checkpoint_worker.py"), str(folder), phase]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2"]
    launcher += ["--master_port", str(free_port())]
    output = run([sys.executable, *worker] if num_ranks == 1 else [*launcher, *worker])
    files = [folder / f"{phase}-rank{rank}.json" for rank in range(num_ranks)]
    assert all(file.exists() for file in files), output[-6000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Phase]:
    folder = tmp_path_factory.mktemp("checkpoints")
    prepare(folder)
    ranks = {"write": 2, "alone": 1, "resume": 2}  # in this order
    return {phase: launch(folder, phase, num_ranks) for phase, num_ranks in ranks.items()}


@pytest.fixture(params=[f"{stage}/{dtype}" for stage, dtype in CASES])
def case(request: pytest.FixtureRequest) -> str:
    return request.param


def whole(hashes: dict[str, str]) -> dict[str, str]:
    """Without what depends on the layout: nothing of it does."""
    assert hashes["counts"] == "[2.0]" and len(hashes) > 20
    assert all(value for key, value in hashes.items() if "exp_avg" in key)
    return hashes


def test_a_fresh_process_continues_to_the_bit(phases: dict[str, Phase], case: str) -> None:
    """Norms, rates, masters, moments and old policy of steps 3 and 4, on both ranks.

    The first attempt wrote the checkpoint only after it had trained them: the copy is one.
    """
    for written, resumed in zip(phases["write"], phases["resume"], strict=True):
        first, second = written[case], resumed[case]
        assert whole(first["saved"]) == whole(second["loaded"])
        assert first["straight"] == second["resumed"]
        assert first["straight"]["after"]["counts"] == "[4.0]"
        assert first["straight"]["after"] != first["saved"]


def test_two_ranks_become_one_and_two_again(phases: dict[str, Phase], case: str) -> None:
    saved = whole(phases["write"][0][case]["saved"])
    (alone,) = phases["alone"]
    assert alone[case]["fresh"] != saved
    assert whole(alone[case]["loaded"]) == saved
    assert whole(phases["resume"][0][case]["grown"]) == saved


def test_another_zero_stage_has_the_same_state(phases: dict[str, Phase], case: str) -> None:
    (alone,) = phases["alone"]
    assert whole(alone[case]["other_stage"]) == whole(phases["write"][0][case]["saved"])


def test_each_rank_copies_its_share_only(phases: dict[str, Phase], case: str) -> None:
    """Masters and two moments in fp32, the old policy in the model's dtype; half per rank."""
    total = phases["write"][0][case]["elements"] * (12 + (2 if "bf16" in case else 4))
    shares = [rank[case]["share"] for rank in phases["write"]]
    assert total <= sum(shares) < 1.01 * total  # nothing twice; step counts beside it
    assert max(shares) < 0.55 * total  # ZeRO-3 pads each parameter, ZeRO-0 rounds


def test_a_checkpoint_of_step_0_resumes_too(phases: dict[str, Phase]) -> None:
    for rank in phases["resume"]:
        assert rank["first"]["straight"] == rank["first"]["resumed"]


def test_a_rank_without_room_stops_all_and_leaves_the_last_good_one(
    phases: dict[str, Phase],
) -> None:
    for rank in phases["resume"]:
        full = rank["full"]
        assert "step 2 was not written: rank 1: " in full["message"], full
        assert "no room for" in full["message"] and "from step 1" in full["message"]
        assert full["loaded"] == {"step": 1} and full["then"] == [1, 2]
        assert full["left"] == ["step-1"]
