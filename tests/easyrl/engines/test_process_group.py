"""Which network interface the ranks of several hosts use among each other."""

import os

import pytest

from easyrl.config import ConfigError
from easyrl.engines import process_group
from easyrl.runtime import interfaces

LAUNCHED = {"RANK": "1", "LOCAL_RANK": "0", "MASTER_PORT": "1", "WORLD_SIZE": "2"}


@pytest.fixture
def start(monkeypatch):
    """Starts a rank as the launcher does; GLOO_SOCKET_IFNAME as it then is."""

    def start(**variables):
        for key in ("GLOO_SOCKET_IFNAME", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(key, raising=False)
        for key, value in (LAUNCHED | variables).items():
            monkeypatch.setenv(key, value)
        process_group.start_process_group()
        return os.environ.get("GLOO_SOCKET_IFNAME")

    monkeypatch.setattr(process_group.deepspeed, "init_distributed", lambda **_: None)
    yield start
    os.environ.pop("GLOO_SOCKET_IFNAME", None)


@pytest.fixture
def own_address(monkeypatch):
    """192.0.2.7 on ``ib0``: this host's address towards every other."""
    monkeypatch.setattr(process_group, "local_address", lambda host: "192.0.2.7")
    own = {"lo": ["127.0.0.1"], "eth0": ["198.51.100.7", "fe80::7%eth0"], "ib0": ["192.0.2.7"]}
    known = {name: [Address(each) for each in all_] for name, all_ in own.items()}
    monkeypatch.setattr(interfaces.psutil, "net_if_addrs", lambda: known)


class Address:
    def __init__(self, address):
        self.address = address


def test_ranks_of_several_hosts_meet_on_the_way_to_the_first(start, own_address):
    assert start(LOCAL_SIZE="1", MASTER_ADDR="192.0.2.1") == "ib0"


@pytest.mark.parametrize("master", ["192.0.2.1", "127.0.1.1"])
def test_what_the_user_has_chosen_stays(start, master):
    assert start(LOCAL_SIZE="1", MASTER_ADDR=master, GLOO_SOCKET_IFNAME="eth0") == "eth0"


@pytest.mark.parametrize("variables", [{"LOCAL_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "2"}, {}])
def test_ranks_of_one_host_meet_on_the_loopback(start, variables):
    loopback = interfaces.interface_of("127.0.0.1")
    assert loopback is not None and start(**variables, MASTER_ADDR="192.0.2.1") == loopback


@pytest.mark.parametrize("master", ["127.0.1.1", "localhost"])
def test_a_first_host_that_is_called_loopback_is_refused(start, master):
    with pytest.raises(ConfigError, match=f"{master}.*--master_addr.*GLOO_SOCKET_IFNAME"):
        start(LOCAL_SIZE="1", MASTER_ADDR=master)


def test_a_first_host_that_nobody_knows_is_named(start):
    with pytest.raises(ConfigError, match="no way leads to nowhere.invalid"):
        start(LOCAL_SIZE="1", MASTER_ADDR="nowhere.invalid")


def test_the_interface_of_an_address(own_address):
    assert interfaces.interface_of("fe80::7") == "eth0"
    assert interfaces.interface_of("203.0.113.1") is None
