"""One small model and one server of it for all runs that leave their server alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.parts.random_model import write_random_model
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess

MAX_MODEL_LEN = 160


@dataclass(frozen=True)
class ServedModel:
    """A run brings its own weights, and leaves them behind."""

    model: Path
    url: str


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    folder = tmp_path_factory.mktemp("served")
    model = write_random_model(folder / "model", hidden_size=32, num_layers=1)
    options = ["--num-threads", "1", "--max-model-len", str(MAX_MODEL_LEN)]
    with EmbeddedServerProcess(model, options) as server:
        yield ServedModel(model, server.url)
