"""The documented bytes per parameter against the tensors that real engines hold (CPU, gloo)."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from easyrl.engines.deepspeed.memory import MOMENTS, bytes_per_parameter
from easyrl.runtime.machine import free_port
from tests.easyrl.engines.test_deepspeed_engine import ROOT, run
from tests.tiny_models import save_tiny_model

# Every matrix but the embeddings has more than the 1e5 elements below which ZeRO-3 keeps a
# parameter whole on each rank.
# 31 million parameters, 124 MB, of which the largest is a twentieth.
LARGE = {"hidden_size": 512, "intermediate_size": 3072, "num_hidden_layers": 6, "head_dim": 64}
OTHERS = ("muon", "adam8bit") if find_spec("bitsandbytes") else ("muon",)
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_key_value_heads": 4}
NOT_MATRICES = 0.02  # at most: the share of embeddings and norms in that model
CASES = {
    1: ("0-fp32", "1-fp32", "1-bf16", "2-fp32", "2-bf16", "3-bf16", "2-bf16-offload")
    + tuple(f"{each}-{optimizer}" for optimizer in OTHERS for each in ("0-fp32", "2-bf16")),
    2: ("0-fp32", "1-bf16", "2-fp32", "2-bf16", "3-fp32", "3-bf16", "load")
    + tuple(f"1-bf16-{optimizer}" for optimizer in OTHERS)
    + tuple(f"{stage}-{dtype}-offload" for stage in (2, 3) for dtype in ("bf16", "fp32")),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="alone", marks=pytest.mark.runs),
        pytest.param(2, id="two-ranks", marks=pytest.mark.slow),
    ],
)
def held(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The number of ranks, and bytes per parameter by engine."""
    num_ranks = request.param
    folder = tmp_path_factory.mktemp("memory")
    save_tiny_model(folder / "model", "qwen3", tied=True, **SHAPE)
    if num_ranks == 2:
        save_tiny_model(folder / "large", "qwen3", tied=True, **LARGE)
    worker = [str(ROOT / "tests/easyrl/engines/memory_worker.py"), str(folder), *CASES[num_ranks]]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2"]
    launcher += ["--master_port", str(free_port())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed is given back at once
        output = run([sys.executable, *worker] if num_ranks == 1 else [*launcher, *worker])
    results = folder / "held.json"
    assert results.exists(), output[-6000:]
    return num_ranks, json.loads(results.read_text())


def test_engines_hold_what_is_documented(held: tuple[int, dict[str, Any]]) -> None:
    """On a CPU host and device are one; offloading has a buffer of the largest parameter more."""
    num_ranks, measured = held
    assert measured.keys() == set(CASES[num_ranks])
    for name, got in measured.items():
        if name == "load":
            continue
        stage, dtype, *special = name.split("-")
        offload = special == ["offload"]
        optimizer = special[0] if special and not offload else "adamw"
        use = bytes_per_parameter(
            int(stage), dtype, num_ranks, offload_optimizer=offload, optimizer=optimizer
        )
        slack = 0.6 if offload else 0.2  # what ZeRO-3 keeps whole, alignment
        if optimizer == "muon":
            slack += 4 * NOT_MATRICES  # where AdamW has 8 bytes
        assert use.device + use.host <= got * 1.001, name
        assert got <= use.device + use.host + slack, (name, got, use)


def test_zero_3_loads_no_whole_model(held: tuple[int, dict[str, Any]]) -> None:
    """Policy and reference, in fp32: half of the 4 bytes on each of two ranks, and one weight."""
    num_ranks, measured = held
    if num_ranks == 1:
        pytest.skip("needs two ranks")
    for rank in measured["load"]:
        for growth in rank:
            assert 2 <= growth < 3, measured["load"]  # 2.4; where each rank loads the whole, 4.0


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_default_stage_needs_no_more_than_the_others(num_ranks: int) -> None:
    """Of the stages that keep the weights whole, and so need no gather in each forward."""
    used = {stage: bytes_per_parameter(stage, "bf16", num_ranks).device for stage in (1, 2)}
    assert used[2] <= used[1]
    assert used == {1: 6 + 12 / num_ranks, 2: 2 + 16 / num_ranks}


def test_documented_table_is_the_functions() -> None:
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs/memory.md").read_text().partition("### ")[0].splitlines()
        if line.startswith("|")
    ]
    ranks = [int(name.split()[0]) for name in header[3:]]
    for stage, dtype, offload, *cells in rows:
        for num_ranks, cell in zip(ranks, cells, strict=True):
            use = bytes_per_parameter(
                int(stage), dtype, num_ranks, offload_optimizer=offload == "yes"
            )
            written = [float(part) for part in cell.split(" + ")]
            figures = [use.device, use.host] if offload == "yes" else [use.device]
            assert written == pytest.approx(figures, abs=0.006), (stage, dtype, num_ranks)
    assert len(rows) == 10


def test_documented_sizes_of_the_optimizers_states_are_the_functions() -> None:
    written = (ROOT / "docs/memory.md").read_text()
    for name, nbytes in MOMENTS.items():
        assert f"| `{name}` | {nbytes:.3g} |" in written, name
    use = bytes_per_parameter(2, "bf16", 8, optimizer="adam8bit")
    assert use.device == pytest.approx(2 + (4 + 4 + 2.03125) / 8)
