"""A small model and honest servers of it, for the tests of the weight sync."""

import pytest

from benchmarks.random_model import write_random_model
from tests.easyrl.weight_sync.weight_sync_parts import serve


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return write_random_model(folder / "model", hidden_size=64, num_layers=2)


@pytest.fixture(scope="module")
def server(model_dir):
    with serve(model_dir) as url:
        yield url


@pytest.fixture(scope="module")
def second_server(model_dir):
    with serve(model_dir) as url:
        yield url
