"""Where the ranks listen for each other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import psutil
import pytest
import torch.distributed as dist

from easyrl.config import ConfigError
from easyrl.runtime import rank_store
from easyrl.runtime.interfaces import interface_of, own_address
from easyrl.runtime.machine import free_port
from easyrl.runtime.rank_store import serve_store

RANK = """
import json, sys
import psutil
from easyrl.engines.process_group import start_process_group
start_process_group()
import torch.distributed as dist
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
collectives = Collectives(Ranks.data_parallel(dist.get_rank(), dist.get_world_size()))
store = collectives.open_store()
found = psutil.Process().net_connections()
said = collectives.all_gather([c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN])
if dist.get_rank() == 0:
    print(json.dumps(said))
dist.destroy_process_group()
"""


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections()
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_of_one_host_listen_on_the_loopback_alone(world_size: int) -> None:
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(world_size)}
    shared |= {"DS_ACCELERATOR": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    addresses = json.loads(said[0].splitlines()[-1])
    assert len(addresses) == world_size
    assert {address for own in addresses for address in own} <= {"127.0.0.1"}


def test_a_store_listens_at_its_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = listening()
    store = serve_store("localhost", wait_for_workers=False)
    assert listening() - before == {("127.0.0.1", store.port)}
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    other.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize("host", ["192.0.2.7", "nowhere.invalid", "127.0.1.1"])
def test_a_host_that_others_cannot_reach_is_told(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A load balancer's address, say, or what Debian calls a machine itself."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_SIZE", "1")
    monkeypatch.setattr(rank_store.dist, "TCPStore", lambda *_, master_listen_fd, **__: (
        socket.socket(fileno=master_listen_fd)))  # fmt: skip
    with serve_store(host) as listener:  # type: ignore[attr-defined]
        assert listener.getsockname()[0] == "0.0.0.0"
    assert f"{host} is no address of this node" in caplog.text


def test_a_port_in_use_is_told_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .*--master_port"):
            serve_store("127.0.0.1", port)


def test_addresses_of_this_host() -> None:
    assert own_address("localhost") == own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("192.0.2.7") is None and own_address("nowhere.invalid") is None
    loopback = interface_of("127.0.0.1")
    assert loopback is not None and loopback.startswith("lo")
    assert interface_of("192.0.2.7") is None
