"""``benchmarks.gpu``: its rows on tiny shapes, what it keeps, and the tables that come of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu
from benchmarks.gpu_table import BEGIN, END, NOT_RUN, PAGE, RESULTS, rendered, write_page
from benchmarks.parts.gpu.model import flops, num_parameters, peak_flops, random_policy, random_row
from benchmarks.parts.gpu.row import measure
from benchmarks.parts.gpu.rows import MODELS, ROWS, TINY_GROUP, Row, rows_of

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in rows_of(smoke=True) if not n.startswith("engine")])
def test_a_row_on_a_tiny_shape(name: str) -> None:
    numbers = measure(rows_of(smoke=True)[name], smoke=True)
    kind = name.split()[0]
    positive = {
        "training": ("row_tokens_per_s", "sequence_tokens_per_s", "tflops", "documented_bytes"),
        "weights": ("bytes", "pageable_gb_per_s", "copy_gb_per_s", "artefact_gb_per_s"),
        "head": (),
    }[kind]
    assert numbers["device"] == "cpu" and numbers["torch"] == torch.__version__
    assert all(numbers[key] > 0 for key in positive)
    assert all(ms > 0 for ms in numbers.get("head_ms", {}).values())
    if kind == "training":
        assert (numbers["step_s"] is None) == ("without optimizer" in name)
        per_parameter = numbers["documented_bytes"] / numbers["parameters"]
        assert per_parameter == (6 if "without optimizer" in name else 18)


WITHOUT = """
import sys
for name in ("deepspeed", "pydantic", "msgspec", "omegaconf", "blake3", "peft", "aiohttp"):
    sys.modules[name] = None
from benchmarks.parts.gpu.row import measure
from benchmarks.parts.gpu.rows import rows_of
for name in ("training tiny", "engine tiny", "weights tiny"):
    print(name, measure(rows_of(smoke=True)[name], smoke=True).get("status", "measured"))
"""


def test_torch_and_transformers_are_enough() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    lines = [line for line in done.stdout.splitlines() if " tiny " in line]
    expected = ["training tiny measured", "engine tiny skipped", "weights tiny measured"]
    assert lines == expected, done.stderr


@pytest.mark.parametrize("name", ["0.6B", "4B", "8B"])
def test_shapes_are_those_of_the_models(name: str) -> None:
    """Of the published sizes, norms left out."""
    published = {"0.6B": 0.596e9, "4B": 4.022e9, "8B": 8.191e9}[name]
    assert num_parameters(MODELS[name]) == pytest.approx(published, rel=1e-3)


def test_parameters_and_products_are_counted_rightly() -> None:
    shape, row = MODELS["tiny"], Row("training", "tiny", recompute="none", attention="merged")
    policy = random_policy(shape, row, CPU)
    matrices = sum(p.numel() for p in policy.parameters() if p.ndim == 2)
    assert num_parameters(shape) == matrices
    packed = random_row(TINY_GROUP, shape.vocab, CPU)
    with FlopCounterMode(display=False) as counter:
        policy(*packed)
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if str(op).startswith(("aten.mm", "aten.addmm")))
    heads = 4 * shape.head_size * shape.heads * shape.layers * packed.layout.num_pairs
    # forward and backward are three times the forward
    assert 3 * (products + heads) == flops(shape, TINY_GROUP, packed.layout)


def test_a_row_is_a_group() -> None:
    packed = random_row(TINY_GROUP, 100, CPU)
    assert len(packed.input_ids) == len(packed.position_ids) == TINY_GROUP.row_tokens
    assert len(packed.label_ids) == TINY_GROUP.responses * TINY_GROUP.length
    after = packed.predictor_index + 1
    inner = packed.predictor_index != TINY_GROUP.prompt - 1
    assert torch.equal(packed.input_ids[after[inner]], packed.label_ids[inner])
    assert int((~inner).sum()) == TINY_GROUP.responses


def test_a_devices_peak() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H20") == 148e12 and peak_flops("Radeon") is None


def test_rows_have_names_of_their_own() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)


# ---- what is kept --------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Scripted results by row; an exception is raised. Those not scripted are done."""
    script: dict[str, Any] = {"asked": []}

    def of(row: Row, limit_s: float, *, smoke: bool) -> dict[str, Any]:
        script["asked"].append(row.name)
        result = script.get(row.name, {"status": "done", "head_ms": {}})
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(gpu, "measured", of)
    return script


def names(file: Path) -> dict[str, str]:
    return {r["name"]: r["status"] for r in json.loads(file.read_text())["rows"]}


def test_a_second_call_goes_on(measured: dict[str, Any], tmp_path: Path) -> None:
    file, rows = tmp_path / "gpu.json", list(rows_of(smoke=True))
    measured[rows[1]] = {"status": "failed", "error": "out of memory"}
    measured[rows[2]] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        gpu.run(file, budget_s=1000, again=False, smoke=True)
    assert names(file) == {rows[0]: "done", rows[1]: "failed"}
    del measured[rows[2]]
    measured["asked"].clear()
    gpu.run(file, budget_s=1000, again=False, smoke=True)
    assert measured["asked"] == rows[2:] and list(names(file)) == rows
    measured["asked"].clear()
    gpu.run(file, budget_s=1000, again=True, smoke=True)
    assert measured["asked"] == [rows[1]]


def test_without_time_for_a_row_it_is_left_for_the_next_call(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.run(tmp_path / "gpu.json", budget_s=1, again=False, smoke=True)
    assert measured["asked"] == [] and "no time left for it; call again" in capsys.readouterr().out


def test_a_call_ends_within_eight_minutes_however_long_its_rows_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The budget bounds it, not the limits, of which each row uses the whole here."""
    now, asked = [1000.0], []

    def slow(row: Row, limit_s: float, *, smoke: bool) -> dict[str, Any]:
        assert limit_s <= row.limit_s
        now[0] += limit_s
        asked.append(row.name)
        return {"status": "failed", "error": "it took too long"}

    monkeypatch.setattr(gpu, "measured", slow)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert sum(row.limit_s for row in ROWS) > gpu.BUDGET_S  # or nothing is shown here
    for _ in range(3):
        begun = now[0]
        gpu.run(tmp_path / "gpu.json", budget_s=gpu.BUDGET_S, again=False, smoke=False)
        assert now[0] - begun <= gpu.BUDGET_S < 8 * 60
    assert sorted(asked) == sorted(row.name for row in ROWS)  # none is starved


@pytest.mark.parametrize("again", [False, True])
def test_a_row_that_lacked_a_package_is_tried_again(
    measured: dict[str, Any], tmp_path: Path, again: bool
) -> None:
    file, row = tmp_path / "gpu.json", "engine tiny"
    measured[row] = {"status": "skipped", "error": "No module named 'deepspeed'"}
    gpu.run(file, budget_s=1000, again=False, smoke=True)
    assert names(file)[row] == "skipped"
    del measured[row]
    measured["asked"].clear()
    gpu.run(file, budget_s=1000, again=again, smoke=True)
    assert measured["asked"] == [row] and names(file)[row] == "done"


def test_a_row_that_fails_says_why() -> None:
    result = gpu.measured(Row("head", "of nothing"), 60, smoke=True)
    assert result["status"] == "failed" and "KeyError: 'head of nothing'" in result["error"]


def test_a_row_that_takes_too_long_is_ended() -> None:
    result = gpu.measured(rows_of(smoke=True)["training tiny"], 0.05, smoke=True)
    assert result == {"status": "failed", "error": "it took longer than 0 s"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(file)])
    assert gpu.main() == 2 and not file.exists()
    assert "there is no CUDA device" in capsys.readouterr().err


def test_tiny_shapes_do_not_go_into_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--smoke"])
    with pytest.raises(SystemExit):
        gpu.main()


# ---- the tables ----------------------------------------------------------------------------------

TRAINED = {
    "name": "training 4B",
    "status": "done",
    "device": "NVIDIA H200",
    "torch": "2.13.0",
    "row_tokens_per_s": 12345.6,
    "sequence_tokens_per_s": 23456.7,
    "mfu": 0.4321,
    "step_s": 0.0512,
    "peak_bytes": 100.26e9,
    "documented_bytes": 72.4e9,
}


WEIGHTS = {
    "status": "done",
    "artefact_gb_per_s": 2.49,
    "copy_gb_per_s": 50.06,
    "pageable_gb_per_s": 4.96,
    "note": "",
}


def test_the_docs_show_what_was_measured() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    shown, end, _ = rest.partition(END)
    assert end and shown.strip() == rendered(json.loads(RESULTS.read_text(encoding="utf-8")))


def test_without_rows_the_page_says_so() -> None:
    assert rendered({"rows": []}) == NOT_RUN


def test_tables() -> None:
    text = rendered(
        {
            "rows": [
                TRAINED,
                TRAINED | {"name": "training 4B plain layers", "mfu": None, "step_s": None},
                WEIGHTS | {"name": "weights 4B"},
                WEIGHTS | {"name": "weights 8B", "artefact_gb_per_s": None, "note": "no room"},
                {"name": "engine 4B", "status": "skipped", "error": "no module\nnamed | deepspeed"},
                {"name": "head 8B", "status": "done", "head_ms": {"512": 12.34, "4096": 9.87}},
            ]
        }
    )
    assert "NVIDIA H200, torch 2.13.0." in text
    numbers = "12,346 | 23,457 | 43.2% | 0.051 | 100.3 | 72.4"
    assert f"| training 4B | {numbers} | 2.5 | 50.1 | 5.0 |" in text
    assert (
        "| training 4B plain layers | 12,346 | 23,457 | – | – | 100.3 | 72.4 | – | – | – |" in text
    )
    assert "| weights 8B | – | – | – | – | – | – | – (no room) | 50.1 | 5.0 |" in text
    assert "weights 4B" not in text
    assert "| engine 4B | skipped: no module named / deepspeed |" in text
    assert "| head 8B | 12.3 | 9.9 |" in text
    widths = {line.count("|") for line in text.splitlines() if "4B" in line or "MFU" in line}
    assert len(widths) == 1


def test_only_what_is_between_the_marks_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    write_page({"rows": []}, page)
    assert page.read_text() == f"above\n{BEGIN}\n{NOT_RUN}\n{END}\nbelow\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no lines"):
        write_page({"rows": []}, page)
