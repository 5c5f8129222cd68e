"""Each listening port of a run is in the documentation's table, and no wider open than it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.hosts.cluster import HOSTS, PORTS, Cluster, wait_for_ranks
from tests.hosts.documented import ROOT
from tests.hosts.events import wait_for_open_batch
from tests.hosts.listeners import Listener, answers, listeners

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]
PAGE, HEADER = "docs/endpoints.md", r"\| *port *\| *who listens.*"
NUM_PROMPTS, BATCH = 24, 8
OPTIONS = [f"trainer.batch_size={BATCH}", "rollout.num_generations=8", "rollout.max_tokens=40"]
MASTER_PORT = 29500  # DeepSpeed's
REFUSED = "ConnectionRefusedError"


def table() -> list[str]:
    """The rows of the documentation's table of ports."""
    page = (ROOT / PAGE).read_text()
    found = re.search(rf"^{HEADER}\n\|[-| ]+\|\n((?:\|.*\n)+)", page, re.M)
    return found[1].splitlines() if found else []


def kind(listener: Listener) -> tuple[str, tuple[str, ...]]:
    """What a row of the table has to contain for it, and the hosts that have to reach it."""
    if "serve" in listener.command and listener.port in PORTS:
        return "easyrl serve", ("train0", "train1")
    if "chunk_server" in listener.command:
        return "weight_sync.port", ("infer0",)
    assert "easyrl.train" in listener.command, f"nobody knows {listener}"
    if listener.port == MASTER_PORT:
        return "MASTER_PORT", ("train1",)
    return "gloo", ("train0", "train1")  # and the ranks' other stores, which look the same


def places(listener: Listener, origin: str) -> Iterator[tuple[str, int]]:
    """The addresses of the listener's host on the networks that ``origin`` is on."""
    for network, address in HOSTS[listener.host].items():
        if network in HOSTS[origin] and origin != listener.host:
            yield address, listener.port


@contextmanager
def stopped(hosts: Cluster) -> Iterator[None]:
    """Inside, the ranks stand still: none of them closes a port."""
    ranks = {(host, each.pid) for host in hosts.trainers for each in listeners(host)
             if "easyrl.train" in each.command}  # fmt: skip
    for host, pid in ranks:
        host.run("kill", "-STOP", str(pid))
    try:
        yield
    finally:
        for host, pid in ranks:
            host.run("kill", "-CONT", str(pid))


def test_ports(hosts: Cluster) -> None:
    rows = table()
    if not rows:
        pytest.skip(f"{PAGE} has no table of ports")
    run_dir = hosts.folder / "ports"
    started = hosts.start_ranks(run_dir, NUM_PROMPTS, *OPTIONS)
    wait_for_open_batch(run_dir, 1, BATCH)
    with stopped(hosts):  # the kernel answers for them
        found = [each for name in HOSTS for each in listeners(hosts.hosts[name])]
        heard = {
            name: answers(host, {place for each in found for place in places(each, name)})
            for name, host in hosts.hosts.items()
        }
    wait_for_ranks(started, 0)  # asked by strangers, the run goes on
    assert "on-policy" in hosts.verify(run_dir)

    assert {kind(each)[0] for each in found} == {
        *("easyrl serve", "weight_sync.port", "MASTER_PORT", "gloo")
    }
    for each in found:
        row, may_reach = kind(each)
        assert any(row in line for line in rows), f"no row of {PAGE} has {row!r}: {each}"
        for name in HOSTS:
            for place in places(each, name):
                assert (heard[name][place] != REFUSED) == each.is_at(place[0]), (each, name)
        for name in set(may_reach) - {each.host}:
            assert any(heard[name][place] != REFUSED for place in places(each, name)), (each, name)
        for place in places(each, "stranger"):
            said = heard["stranger"][place]
            assert said == REFUSED or " 401 " in said, f"{each} asks a stranger for no key: {said}"
