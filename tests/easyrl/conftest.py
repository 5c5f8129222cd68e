"""A small model and honest servers of it, for the tests of the weight sync."""

import pytest


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    from benchmarks.parts.random_model import write_random_model  # GPU tests may have torch alone

    folder = tmp_path_factory.mktemp("weights")
    return write_random_model(folder / "model", hidden_size=64, num_layers=2)


@pytest.fixture(scope="module")
def server(model_dir):
    from tests.easyrl.weight_sync.weight_sync_parts import serve

    with serve(model_dir) as url:
        yield url


@pytest.fixture(scope="module")
def second_server(model_dir):
    from tests.easyrl.weight_sync.weight_sync_parts import serve

    with serve(model_dir) as url:
        yield url
