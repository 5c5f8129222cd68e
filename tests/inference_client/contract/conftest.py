"""One contract, two engines: every test here runs against the embedded server and real vLLM.

A server is started when the first test asks for it and serves all tests of its kind; an embedded
one stays, because a process that is given file after file needs both kinds again for each. Tests
may leave other weights behind: ``Server.model`` is always the model whose weights are served.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess, VllmServerProcess
from easyrl.inference_client.servers.managed.server_process import ServerProcess
from tests.inference_client.contract.served_models import (
    MAX_MODEL_LEN,
    contract_model,
    save_contract_model,
)
from tests.vllm_environment import VLLM_PYTHON

MAX_NUM_SEQS = 32
BY_HEADS = "test_contract_weights.py"  # a head of its own is a weight more: it matters here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What asks nothing of a head is asked of real vLLM once; of an untied one among the slow."""
    for item in items:
        is_here = item.path.parent == Path(__file__).parent
        if is_here and "vllm-untied" in item.nodeid and item.path.name != BY_HEADS:
            item.add_marker(pytest.mark.slow)


@dataclass
class Server:
    """A running server and the model whose weights it serves now."""

    engine: str
    tied: bool
    process: ServerProcess
    model: Any = field(repr=False)  # PreTrainedModel

    @property
    def url(self) -> str:
        return self.process.url

    def crash_and_restart(self) -> None:
        """What a crash and a watchful user do: it serves the weights of its folder again."""
        self.process.kill()
        self.process.restart()
        self.model = contract_model(self.tied)


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], Server]]:
    """The embedded server whose model has a tied head, or an untied one."""
    with ExitStack() as opened:
        yield functools.cache(
            lambda tied: opened.enter_context(
                _serve("embedded", tied, tmp_path_factory.mktemp("served"))
            )
        )


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(("embedded", True), id="embedded-tied"),
        pytest.param(("embedded", False), id="embedded-untied"),
        pytest.param(("vllm", True), id="vllm-tied", marks=pytest.mark.vllm),
        pytest.param(("vllm", False), id="vllm-untied", marks=pytest.mark.vllm),
    ],
)
def server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    embedded: Callable[[bool], Server],
) -> Iterator[Server]:
    engine, tied = request.param
    if engine == "embedded":
        yield embedded(tied)
        return
    with _serve(engine, tied, tmp_path_factory.mktemp("served")) as server:
        yield server  # and ends before the next vLLM, which may want the whole device


@contextmanager
def _serve(engine: str, tied: bool, folder: Path) -> Iterator[Server]:
    with _start(engine, save_contract_model(folder / "model", tied), folder / "log") as process:
        yield Server(engine, tied, process, contract_model(tied))


def _start(engine: str, model: Path, log: Path) -> ServerProcess:
    options = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
    if engine == "embedded":
        options += ["--num-threads", "1", "--max-queue", "128"]
        return EmbeddedServerProcess(model, options, log=log)
    return VllmServerProcess(model, Path(VLLM_PYTHON), options, log=log)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=60)
    # a connection each: what one test leaves behind must not break the next
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield session


@pytest.fixture
def client(server: Server, http: aiohttp.ClientSession) -> EndpointClient:
    return EndpointClient(server.url, http, timeout_s=60)
