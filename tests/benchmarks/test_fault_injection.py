"""The tormentor of servers does what it says, to the whole of a server, and lets it return."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.parts.fault_injection import FaultInjector, Schedule, Victim
from easyrl.inference_client.servers.managed.server_process import ServerProcess
from easyrl.runtime.machine import free_port
from easyrl.runtime.process_guard import session_members

# answers /health; has a child, as vLLM has its engine core
SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class FakeServer(ServerProcess):
    def __init__(self) -> None:
        super().__init__(port=free_port(), cpus=None, log=None, start_timeout_s=30, wait=True)

    def _command(self) -> list[str]:
        return [sys.executable, "-c", SERVER, str(self.port)]

    def _environment(self) -> dict[str, str]:
        return {}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def statuses(server: ServerProcess) -> set[str]:
    return {psutil.Process(pid).status() for pid in session_members(server.process.pid)}


def follow_until_over(victim: Victim) -> None:
    deadline = time.monotonic() + 30
    while victim.fault is not None:
        assert time.monotonic() < deadline
        victim.follow_up()
        time.sleep(0.05)


def test_a_kill_takes_all_processes_and_the_port_serves_again(server: FakeServer) -> None:
    session, url = server.process.pid, server.url
    assert len(session_members(session)) == 2
    victim = Victim(server)
    assert victim.is_live
    fault = victim.strike("kill", lasting_s=0.3, both=False)
    assert session_members(session) == []
    victim.follow_up()
    assert server.has_ended and fault.returned_s is None  # its time has not come
    follow_until_over(victim)
    assert victim.is_live and server.url == url
    assert fault.at_s + 0.3 <= fault.returned_s <= fault.answered_s


def test_a_server_that_is_asked_to_end_serves_its_port_again(server: FakeServer) -> None:
    victim = Victim(server)
    victim.strike("end", lasting_s=0.2)
    assert server.process.wait(10) == -signal.SIGTERM and not victim.is_live
    follow_until_over(victim)
    assert victim.is_live


def test_a_stop_freezes_all_processes_until_it_is_over(server: FakeServer) -> None:
    victim = Victim(server)
    pid = server.process.pid
    victim.strike("stop", lasting_s=1.5, both=False)
    deadline = time.monotonic() + 10
    while statuses(server) != {psutil.STATUS_STOPPED}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not victim.is_live
    follow_until_over(victim)
    assert psutil.STATUS_STOPPED not in statuses(server)
    assert server.process.pid == pid and victim.is_live


def test_only_live_servers_are_hit_and_what_is_stopped_goes_on_at_the_end(
    server: FakeServer,
) -> None:
    often = Schedule(calm_s=(0.05, 0.1), stopped_s=(60.0, 60.0), kill_share=0.0)
    injector = FaultInjector([server], seed=1, schedule=often)
    injector.start()
    deadline = time.monotonic() + 20
    while not injector.faults:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.6)
    assert len(injector.faults) == 1  # it is stopped: nothing to hit
    injector.end()
    assert injector.error is None
    assert server.is_healthy()


def test_all_servers_can_be_hit_at_once(server: FakeServer) -> None:
    with FakeServer() as other:
        always = Schedule(calm_s=(0.05, 0.1), stopped_s=(60.0, 60.0), kill_share=0, both_share=1)
        injector = FaultInjector([server, other], seed=1, schedule=always)
        injector.start()
        deadline = time.monotonic() + 20
        while len(injector.faults) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        injector.end()
        assert {fault.url for fault in injector.faults} == {server.url, other.url}
        assert all(fault.both for fault in injector.faults)
