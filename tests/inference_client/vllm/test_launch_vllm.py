"""A real vLLM as a managed server: it comes up with what EasyRL needs, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import requests

from easyrl.config import LaunchConfig, SamplingConfig
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import EndpointError
from easyrl.inference_client.responses import parse_generate_response
from easyrl.inference_client.servers.managed.launch import VllmServerProcess
from easyrl.inference_client.servers.managed.server_process import ServerStartError
from easyrl.inference_client.servers.managed.supervisor import ManagedServers
from easyrl.runtime.process_guard import session_members
from tests.inference_client.test_launch import answers
from tests.inference_client.vllm.plugin_server import PLUGIN_PATH
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from tests.vllm_environment import VLLM_PYTHON
from tests.waiting import eventually

pytestmark = pytest.mark.vllm
OPTIONS = ["--max-model-len=128", "--max-num-seqs=8"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(directory)
    return save_tiny_model(directory, "qwen3", head_dim=32, vocab_size=len(tokenizer))


@pytest.fixture(scope="module")
def server(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServerProcess]:
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with VllmServerProcess(model_dir, Path(VLLM_PYTHON), OPTIONS, log=log) as process:
        yield process


def test_has_the_routes_that_easyrl_needs(server: VllmServerProcess, model_dir: Path) -> None:
    asked = {
        "model": str(model_dir),
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 4, "logprobs": 0, "seed": 1, "temperature": 1.0},
    }
    reply = requests.post(f"{server.url}/inference/v1/generate", json=asked, timeout=60)
    assert reply.status_code == 200 and reply.json()["choices"][0]["token_ids"]
    info = requests.get(f"{server.url}/weight_info", timeout=10).json()
    assert info["weight_version"] == "default"
    transfer = requests.post(f"{server.url}/init_weight_transfer_engine", json={}, timeout=60)
    assert transfer.status_code >= 400 and "init_info" in transfer.text


def test_port_of_a_running_server_is_refused(server: VllmServerProcess, model_dir: Path) -> None:
    with pytest.raises(ServerStartError, match=f"port {server.port} is in use"):
        VllmServerProcess(model_dir, Path(VLLM_PYTHON), OPTIONS, port=server.port)


def test_engine_cores_do_not_survive_a_kill_of_the_server(server: VllmServerProcess) -> None:
    """The last test with ``server``: it ends here."""
    session = server.process.pid
    members = session_members(session)
    assert len(members) > 1  # API server and engine core
    server.kill()
    assert not session_members(session)


def test_engine_cores_do_not_survive_a_kill_of_the_trainer(model_dir: Path) -> None:
    program = """
        import sys, time
        from pathlib import Path
        from easyrl.inference_client.servers.managed.launch import VllmServerProcess
        model, python, *options = sys.argv[1:]
        server = VllmServerProcess(Path(model), Path(python), options)
        print(server.process.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(model_dir), VLLM_PYTHON, *OPTIONS],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    session = int(parent.stdout.readline())
    assert len(session_members(session)) > 1
    parent.kill()
    parent.wait()
    assert eventually(lambda: not session_members(session))


def _asks_for_its_key_everywhere(url: str) -> None:
    listed = requests.get(f"{url}/openapi.json", timeout=10)
    assert listed.status_code == 401  # even the list of its routes
    for route in (
        *("/inference/v1/generate", "/v1/completions", "/pause", "/resume", "/collective_rpc"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
        *("/finish_weight_update", "/update_weight_version", "/reset_prefix_cache"),
        *("/weight_checker", "/abort_requests", "/sleep", "/no_such_route"),
    ):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            reply = requests.post(f"{url}{route}", json={}, headers=headers, timeout=10)
            assert reply.status_code == 401, route
    for route in ("/v1/models", "/weight_info", "/get_world_size", "/is_paused", "/version"):
        assert requests.get(f"{url}{route}", timeout=10).status_code == 401, route
    assert requests.get(f"{url}/metrics", timeout=10).status_code == 200


async def _takes_what_a_run_sends(url: str, key: str) -> None:
    async with aiohttp.ClientSession() as session:
        client = EndpointClient(url, session, api_key=key)
        assert (await client.served_model()).max_model_len == 128
        assert await client.weight_version() == "default"
        await client.pause("wait")
        await client.set_weight_version("run:0:0")
        await client.resume()
        body = await client.generate([5, 6, 7], SamplingConfig(max_tokens=4), seed=1)
        (made,) = parse_generate_response(body, url, 3)
        assert {span.version for span in made.version_spans} == {"run:0:0"}
        assert await client.num_tokens_made(10.0)
        with pytest.raises(EndpointError, match="init_info"):  # it asks for what is missing
            await client._request("POST", "/init_weight_transfer_engine", {})


def test_managed_server_is_restarted_after_its_first_process_is_killed(
    model_dir: Path, tmp_path: Path
) -> None:
    # the plugin of this checkout, whichever is installed
    env = {"PYTHONPATH": PLUGIN_PATH}
    config = LaunchConfig(engine="vllm", python=Path(VLLM_PYTHON), options=OPTIONS, env=env)
    servers = ManagedServers(config, model_dir, tmp_path, "fp32")
    try:
        (url,) = servers.start()
        assert eventually(lambda: answers(url), 240)
        key = servers.api_keys[url]
        _asks_for_its_key_everywhere(url)
        asyncio.run(_takes_what_a_run_sends(url, key))
        (watched,) = servers._watched
        first = watched.server.process.pid
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: not session_members(first), 60)
        assert eventually(lambda: answers(url), 240)
        second = watched.server.process.pid
        assert second != first
        _asks_for_its_key_everywhere(url)
        asyncio.run(_takes_what_a_run_sends(url, key))
        assert key not in (tmp_path / "server-0.log").read_text()
    finally:
        start = time.monotonic()
        servers.close()
    assert not session_members(second)
    assert time.monotonic() - start < 40
