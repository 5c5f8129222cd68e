"""Rates from a file: those of a run come back, and what is wrong is named."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from easyrl.simulation.setting import Rates
from easyrl.simulation.stated_rates import StatedRates, read_rates
from tests.easyrl.simulation.test_pipeline import RATES


def written(folder: Path, tree: object) -> Path:
    path = folder / "rates.json"
    path.write_text(json.dumps(tree))
    return path


def test_rates_come_back(tmp_path: Path) -> None:
    assert read_rates(written(tmp_path, asdict(RATES))) == RATES
    assert list(StatedRates.model_fields) == [field.name for field in fields(Rates)]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"prefill_s": -1}, "prefill_s: Input should be greater than or equal to 0"),
        ({"prefill_s": "fast"}, "prefill_s: Input should be a valid number"),
        ({"prefill_s": float("nan")}, "prefill_s: "),
        ({"prefil_s": 0.1}, "prefil_s: unknown key; did you mean 'prefill_s'?"),
        ({"decode_step_s": 0, "decode_each_s": 0}, "decode_step_s: with decode_each_s 0"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changed: dict, reason: str) -> None:
    with pytest.raises(ValueError, match="--rates: .*rates.json: 1 problem") as error:
        read_rates(written(tmp_path, asdict(RATES) | changed))
    assert reason in str(error.value)


def test_a_file_without_rates_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="border_s: is required"):
        read_rates(written(tmp_path, {}))
    with pytest.raises(ValueError, match=r"has no object of rates; easyrl plan RUN_DIR --json"):
        read_rates(written(tmp_path, [1]))
    (tmp_path / "rates.json").write_text("decode_step_s: 1")
    with pytest.raises(ValueError, match="is no JSON"):
        read_rates(tmp_path / "rates.json")
