"""The benchmark of rows by thread: one line of its table, with small rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import row_threads


def test_a_line_compares_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = row_threads.Load(num_layers=1, groups=1, prompt=4, response=6)
    monkeypatch.setitem(row_threads.LOADS, "small", load)
    before = torch.get_num_threads()
    try:
        line = row_threads.measure("small", tmp_path / "model", 2, 2)
    finally:
        torch.set_num_threads(before)
    assert line["same_bits"] is True and len(line["tokens"]) == 2  # type: ignore[arg-type]
    assert line["ms"].keys() == line["processor_ms"].keys() == {"one", "all", "each"}  # type: ignore[attr-defined]


def test_a_row_is_of_its_seed() -> None:
    load = row_threads.LOADS["short"]
    assert torch.equal(load.row(1).input_ids, load.row(1).input_ids)
    assert load.row(1).num_tokens != load.row(2).num_tokens
