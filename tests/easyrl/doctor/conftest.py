"""A model with records beside it, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.parts.random_model import write_random_model
from tests.easyrl.doctor.parts import serve, write_records


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    made = write_random_model(folder / "model", hidden_size=64, num_layers=2, weight_std=0.2)
    write_records(made)
    return made


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    with serve(model) as url:
        yield url
