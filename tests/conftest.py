"""Settings of each test process, before it imports torch: one thread, and a quiet collector."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.optional_packages import missing_package
from tests.vllm_environment import missing_vllm

# Test processes run side by side, and OpenMP's threads spin while they wait: with two on two busy
# cores, small products took twenty times as long. A process that runs alone starts vLLM servers,
# which keep their own number.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests that took half a second or more on two busy cores, the mean over their parameters: from what
# ``--durations=0`` said of a whole run, but for those that a change must never go without.
LONG_TESTS = Path(__file__).with_name("long_tests.txt")
# Python's collector does not walk, again and again, what torch and transformers leave behind.
gc.disable()  # while tests are collected, which imports everything


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whoever asks for vLLM's tests is told that they cannot run; a skip would look like a pass."""
    reason = missing_vllm() if item.get_closest_marker("vllm") else None
    if reason is not None:
        pytest.fail(reason, pytrace=False)
    if item.get_closest_marker("gpu") and "EASYRL_TEST_DEVICE" not in os.environ:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """An optional package that a GPU machine lacks, or has too old, costs the tests that need it,
    and says so. Any other import that fails is a failure."""
    try:
        yield
    except (ImportError, RuntimeError) as error:
        if item.get_closest_marker("gpu") and missing_package(error) is not None:
            pytest.skip(str(error))
        raise


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        choices=("with", "without", "only"),
        default="with",
        help=f"the tests of tests/{LONG_TESTS.name}, which take half a second or more",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _choose_by_length(config, items)
    _allow_time(items)


def _choose_by_length(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--long")
    if wanted == "with":
        return
    long = set(LONG_TESTS.read_text().split())

    def is_chosen(item: pytest.Item) -> bool:
        return (item.nodeid.partition("[")[0] in long) == (wanted == "only")

    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = filter(is_chosen, items)


def _allow_time(items: list[pytest.Item]) -> None:
    """A fixture may launch five engines, minutes each on a busy machine; a launch has its end."""
    for item in items:
        takes_long = item.get_closest_marker("runs") or item.get_closest_marker("slow")
        if takes_long and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
