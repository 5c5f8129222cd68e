"""PPO's two models on real DeepSpeed engines, ZeRO 0 to 3, alone and on two ranks (CPU, gloo).

One launch per number of ranks runs all cases in turn (``critic_worker.py``), two ranks first: they
leave the checkpoints that one rank loads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from easyrl.runtime.machine import free_port
from tests.easyrl.engines.critic_cases import STAGES, TARGETS, prepare
from tests.easyrl.engines.test_deepspeed_engine import ROOT, run

pytestmark = pytest.mark.slow

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Results]]:
    """By number of ranks and by rank, what was measured."""
    folder = tmp_path_factory.mktemp("critic")
    prepare(folder)
    return {num_ranks: launch(folder, num_ranks) for num_ranks in (2, 1)}


def launch(folder: Path, num_ranks: int) -> list[Results]:
    worker = [str(ROOT / "tests/easyrl/engines/critic_worker.py"), str(folder)]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2"]
    launcher += ["--master_port", str(free_port())]
    output = run([sys.executable, *worker] if num_ranks == 1 else [*launcher, *worker])
    files = [folder / f"critic-{num_ranks}-rank{rank}.json" for rank in range(num_ranks)]
    assert all(file.exists() for file in files), output[-6000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(params=[2, 1], ids=["two-ranks", "alone"])
def ranks(request: pytest.FixtureRequest, launches: dict[int, list[Results]]) -> list[Results]:
    return launches[request.param]


def cases(results: Results, kind: str) -> Results:
    found = {n: case for n, case in results.items() if n.partition("/")[0] == kind}
    assert found
    for name, case in found.items():
        assert "error" not in case, f"{name}: {case['error']}"
    return found


def test_both_gradients_are_the_dense_ones(ranks: list[Results]) -> None:
    """Of surrogate and value loss, each with its own denominator, norm and clip; streamed, whitened
    over all ranks, with a KL in the reward, with an offloaded reference and optimizer, of adapters.
    """
    found = cases(ranks[0], "gradient")
    assert len(found) == 2 * len(STAGES) + 3 + 1 + 1
    for name, case in found.items():
        assert not case["skipped"] and any(case["clipped"]), name
        assert max(case["gradients"]) < 2e-5, (name, case)  # fp32; measured 3e-6
        assert max(case["norms"]) < 1e-5, (name, case)
        got, expected = case["explained_variance"]
        assert got == pytest.approx(expected, rel=1e-4), name
        assert "score.weight" in case["critic_names"], name
        assert not any("lm_head" in weight for weight in case["critic_names"]), name


def test_with_adapters_the_critics_model_stays_as_it_was(ranks: list[Results]) -> None:
    """As it is saved: merged, the adapted layers and the value head have moved, and only they."""
    found = cases(ranks[0], "gradient")
    plain, lora = found["gradient/2/True"], found["gradient/2/lora"]
    assert lora["critic_names"] == plain["critic_names"] and plain["critic_unchanged"] == []
    adapted = tuple(f".{target}.weight" for target in TARGETS)
    moved = set(lora["critic_names"]) - set(lora["critic_unchanged"])
    assert moved == {n for n in lora["critic_names"] if n.endswith((*adapted, "score.weight"))}


def test_a_gradient_that_is_not_finite_skips_both_steps(ranks: list[Results]) -> None:
    """A NaN of the last rank, in either loss or in either gradient alone; all ranks agree.

    Masters, moments, counts, schedules and weights are as before, and the next step is as if
    nothing had been.
    """
    gradients = {"policy's gradient", "critic's gradient"}
    for rank, results in enumerate(ranks):
        for name, case in cases(results, "skip").items():
            assert set(case) == {"returns", "advantages", *gradients, "discard"}
            for what, told in case.items():
                finite = told.pop("finite_losses")
                assert finite == (what not in ("returns", "advantages") or rank < len(ranks) - 1)
                expected = {"skipped": True, "unchanged": True, "goes_on": True}
                assert told == expected, (name, what, told)


def test_values_are_of_the_critic_as_the_batch_began(ranks: list[Results]) -> None:
    for name, case in cases(ranks[0], "updates").items():
        first, second, third, fourth = case["values"]
        assert first == second and third == fourth, name  # an update came between the two
        assert first != third, name
        assert case["clip_fraction"] > 0, name  # the live critic has left the old values


def test_a_checkpoint_holds_both_models_to_the_bit(ranks: list[Results]) -> None:
    for results in ranks:
        for name, case in cases(results, "resume").items():
            for what in ("loading_changed", "loaded", "continued", "same_results"):
                assert case[what], (name, what)


def test_two_ranks_checkpoints_are_loaded_by_one(launches: dict[int, list[Results]]) -> None:
    (alone,), (first, _) = launches[1], launches[2]
    for case in (*(f"resume/{stage}/fp32" for stage in STAGES), "resume/2/lora"):
        saved = first[case]["saved_weights"]
        assert saved and alone[case]["of_two_ranks"] == saved, case


def test_what_does_not_fit_is_refused_by_name(ranks: list[Results]) -> None:
    (case,) = cases(ranks[0], "refusals").values()
    assert "number of the critic's parameters is " in case["said"][0]
    if len(ranks) > 1:
        assert case["said"][1].startswith("trainer.zero_stage: 3 shards the reference")
    else:
        assert len(case["said"]) == 1  # one rank holds all of it


def test_steps_that_do_not_wait_for_each_other_would_be_seen(ranks: list[Results]) -> None:
    (case,) = cases(ranks[0], "control").values()
    assert case == {"skipped": [False, True], "moved": True}
