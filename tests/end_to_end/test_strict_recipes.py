"""Strict runs of each recipe come to the same weights, synchronous or not, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.end_to_end.test_strict_mode import UnevenProxy
from tests.golden.whole_run import Inputs, outcome, servers, train

RECIPES = [
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "gspo_token",
    "cispo",
    "rloo",
    "two_sided",
    "dual_clip",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gdpo",
]
OF_EACH_SPAN_AND_SCOPE = {"cispo", "gspo", "reinforce_pp"}  # the others: make test-slow
NUM_STEPS, NUM_UPDATES = 4, 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("strict-recipes"))


@pytest.fixture(scope="module")
def urls(inputs: Inputs) -> Iterator[tuple[list[str], list[str]]]:
    """Of one server, and of two that answer late, each response by another time."""
    with ExitStack() as opened:
        direct = [server.url for server in opened.enter_context(servers(inputs.model, 2))]
        late = []
        for seed, url in enumerate(direct):
            proxy = UnevenProxy(url, seed)
            opened.callback(proxy.close)
            late.append(proxy.url)
        yield direct[:1], late


@pytest.mark.runs
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in OF_EACH_SPAN_AND_SCOPE else pytest.mark.slow)
        for n in RECIPES
    ],
)
def test_the_final_weights_are_the_same(
    tmp_path: Path, inputs: Inputs, urls: tuple[list[str], list[str]], name: str
) -> None:
    outcomes = {}
    for mode, own in zip(("sync", "async"), urls, strict=True):
        train(
            tmp_path / mode,
            inputs,
            own,
            f"run.mode={mode}",
            f"recipe={{name: {name}}}",
            f"trainer.updates_per_batch={NUM_UPDATES}",
            f"trainer.max_steps={NUM_STEPS}",
        )
        outcomes[mode] = outcome(tmp_path / mode)
    assert outcomes["sync"]["steps"] == outcomes["async"]["steps"]
    assert outcomes["sync"]["weights"] == outcomes["async"]["weights"]
    last = outcomes["sync"]["steps"][-1]
    assert last["grad_norm"] > 0
    if "policy/ratio" in last:
        assert last["policy/ratio"] != 1  # the second update is on another policy's samples
