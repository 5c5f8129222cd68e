"""Runs are held against the documentation's table of ports, row by row and in both directions.

Each port that is listened on has a row, each row that can exist here was seen. What a row says is
tried: which hosts reach the port, which do not, and what who has no key is told there.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts.cluster import HOSTS, Cluster, wait_for_ranks
from tests.hosts.documented import ROOT
from tests.hosts.events import BATCH_S, num_events
from tests.hosts.listeners import WILDCARDS, Listener, answers, listeners
from tests.hosts.namespaces import Host
from tests.waiting import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]
PAGE, HEADER = "docs/endpoints.md", r"\| *port *\| *who listens.*"
NUM_PROMPTS = 48
HELD_S = 300  # at most
MASTER_PORT = 29500  # DeepSpeed's
REFUSED = "ConnectionRefusedError"
LOOPBACK = "127.0.0.1"

_ARE_STORES = """
import json, sys
from benchmarks.parts.store_protocol import is_store
print(json.dumps([is_store(*place) for place in json.loads(sys.argv[1])]))
"""

_HELD_REWARD = """
import time
from pathlib import Path

def reward_func(prompt, texts, token_ids):
    while Path({hold!r}).exists():
        time.sleep(0.05)
    return [float(len(ids) % 2) for ids in token_ids]
"""

# The rows, by how their first cell begins.
ENDPOINT, LAUNCHED, WEIGHTS = "an endpoint's", "servers of `inference.launch`", "`weight_sync.port`"
MASTER, SECOND, GLOO = "`MASTER_PORT`", "two more free ports", "free ports of `gloo`"
SSH = "22"
OF_A_CLUSTER = {ENDPOINT, WEIGHTS, MASTER, SECOND, GLOO, SSH}
OF_ONE_HOST = {LAUNCHED, WEIGHTS, GLOO}
NOT_HERE = {"free ports of `nccl`", "a free port, with", "vLLM's own"}  # devices, or vLLM

# What the cells say. Hosts that have to reach a port; the other ones that do, by its address; and
# how the guard's cell begins, with what it has to tell a stranger who asks for a page.
NEED = {
    "all training nodes": {"train0", "train1"},
    "the training nodes": {"train0", "train1"},
    "the endpoints' hosts": {"infer0"},
    "the first training node": {"train0"},
    "this host": set[str](),
}
NO_OTHER, OF_THAT_NETWORK, OF_EVERY_NETWORK = "no other host", "that network", "every network"
GUARDS = {
    ENDPOINT: ("the key", " 401 "),
    LAUNCHED: ("a key", " 401 "),
    WEIGHTS: ("a token", " 401 "),
    MASTER: ("**nothing**", "silent"),  # "no answer"
    SECOND: ("**nothing**, as `MASTER_PORT`", "silent"),
    GLOO: ("**nothing**", "silent"),  # "no answer"
    SSH: ("ssh", "SSH-2.0"),
}


@dataclass(frozen=True)
class Row:
    """Of the table; its cells."""

    port: str
    where: str
    need: str
    others: str
    guard: str


Started = tuple[subprocess.Popen[bytes], Path]  # and its log
Found = dict[Listener, str]  # with the beginning of its row


def table() -> dict[str, Row]:
    """The documentation's table, by how the rows of this file begin. It has to be there."""
    page = (ROOT / PAGE).read_text()
    found = re.search(rf"^{HEADER}\n\|[-| ]+\|\n((?:\|.*\n)+)", page, re.M)
    assert found is not None, f"{PAGE} has no table of ports"
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in found[1].splitlines()]
    rows = {}
    for row in (Row(*each) for each in cells):
        (begins,) = [name for name in {*GUARDS, *NOT_HERE} if row.port.startswith(name)]
        rows[begins] = row
    return rows


def row_of(listener: Listener, stores: Collection[int]) -> str:
    """The beginning of its row; ``stores`` are the ports of its host at which stores answer."""
    if "sshd" in listener.command and listener.port == 22:
        return SSH
    if "chunk_server" in listener.command:
        return WEIGHTS
    if " serve " in listener.command:
        return ENDPOINT
    if "embedded.server" in listener.command:
        return LAUNCHED
    assert "easyrl.train" in listener.command, f"nobody knows {listener}"
    if listener.port in stores:
        return MASTER if listener.port == MASTER_PORT else SECOND
    return GLOO


def find(host: Host) -> Found:
    """What listens on ``host``, with its rows."""
    found = listeners(host)
    own = [each for each in found if "easyrl.train" in each.command]
    stores = are_stores(host, [(each.address, each.port) for each in own])
    return {each: row_of(each, [port for _, port in stores]) for each in found}


def are_stores(host: Host, places: Collection[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those of ``places`` at which a store answers a client on ``host`` that has no key."""
    said = host.run(sys.executable, "-c", _ARE_STORES, json.dumps(list(places)))
    return [place for place, is_one in zip(places, json.loads(said), strict=True) if is_one]


def places(listener: Listener, origin: str) -> Iterator[tuple[str, int]]:
    """Its port at the addresses of its host that ``origin`` has a way to."""
    if origin == listener.host:
        yield LOOPBACK, listener.port
    for network, address in HOSTS[listener.host].items():
        if network in HOSTS[origin]:
            yield address, listener.port


def ask(hosts: Cluster, found: Found) -> dict[str, dict[tuple[str, int], str]]:
    """What each host is told at each address and port, a page asked for without a key."""
    return {
        name: answers(host, {place for each in found for place in places(each, name)})
        for name, host in hosts.hosts.items()
    }


def reaching(listener: Listener, address: str) -> set[str]:
    """The other hosts that have a way to ``address`` of the listener's host, or to any of all."""
    networks = {name for name, own in HOSTS[listener.host].items() if address in (*WILDCARDS, own)}
    return {name for name in HOSTS if networks & set(HOSTS[name])} - {listener.host}


def assert_as_the_row_says(
    listener: Listener, begins: str, row: Row, need: Collection[str], told: dict
) -> None:
    """It listens where it should, who has to reach it does, who else as the row says."""
    reach = reaching(listener, listener.address)
    if listener.address in WILDCARDS:
        assert begins in (ENDPOINT, SSH) and OF_EVERY_NETWORK in row.others, listener
    elif listener.address == LOOPBACK:
        assert not reach and row.others in (NO_OTHER, f"the hosts of {OF_THAT_NETWORK}"), listener
    else:
        assert listener.address == HOSTS[listener.host]["cluster"], listener
        assert row.others == f"the hosts of {OF_THAT_NETWORK}", listener
    assert reach >= set(need) - {listener.host}, listener
    for name in HOSTS:
        for place in places(listener, name):
            is_there = listener.address in (*WILDCARDS, place[0])
            assert (told[name][place] != REFUSED) == is_there, (listener, name, place)


def assert_guarded(listener: Listener, begins: str, told: dict) -> None:
    """Whoever reaches it, without a key, is told what the row's guard tells strangers."""
    said = [told[name][place] for name in HOSTS for place in places(listener, name)]
    reached = [each for each in said if each != REFUSED]
    assert reached and all(GUARDS[begins][1] in each for each in reached), (listener, said)


class Held:
    """A reward with which a run stays in the batch that it is in, from ``begin`` to ``end``."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._hold = run_dir, run_dir.with_suffix(".hold")
        reward = run_dir.with_suffix(".py")
        reward.write_text(_HELD_REWARD.format(hold=str(self._hold)))
        self.setting = f"rewards=[{{file: {reward}, timeout_s: {HELD_S}}}]"

    def begin(self, num_ranks: int) -> None:
        """Once all ranks have begun a batch."""
        wait_until(lambda: num_events(self._run_dir, "batch_dispatched") >= num_ranks, BATCH_S)
        self._hold.touch()

    def end(self, started: Sequence[Started]) -> None:
        """The run goes on and ends well. It must not have ended before."""
        was_over = [process.poll() is not None for process, _ in started]
        self._hold.unlink()
        assert not any(was_over)
        wait_for_ranks(started, 0)


def test_each_row_is_known() -> None:
    rows = table()
    assert set(rows) == OF_A_CLUSTER | OF_ONE_HOST | NOT_HERE
    for begins in GUARDS:
        assert rows[begins].need in NEED and rows[begins].guard.startswith(GUARDS[begins][0])
    assert all("not in the test" in rows[begins].guard for begins in NOT_HERE)
    for begins, words in ((ENDPOINT, "401"), (MASTER, "no answer"), (GLOO, "no answer")):
        assert words in rows[begins].guard


def test_ports_of_a_run_on_several_hosts(hosts: Cluster) -> None:
    hosts.start_sshd()
    run_dir = hosts.folder / "ports"
    held = Held(run_dir)
    started = hosts.start_ranks(run_dir, NUM_PROMPTS, held.setting)
    held.begin(num_ranks=2)
    found = {each: row for host in hosts.hosts.values() for each, row in find(host).items()}
    told = ask(hosts, found)
    stores = {(e.address, e.port) for e, row in found.items() if row in (MASTER, SECOND)}
    open_to_infer0 = are_stores(hosts.hosts["infer0"], stores)
    logins = [login(hosts.hosts[name], "train0") for name in ("infer0", "stranger")]
    routed = through(hosts.hosts["stranger"], "train0", found)
    held.end(started)  # asked by strangers, the run goes on
    assert "on-policy" in hosts.verify(run_dir)

    assert set(found.values()) == OF_A_CLUSTER
    assert {each.host for each, row in found.items() if row == GLOO} == {"train0", "train1"}
    for each, begins in found.items():
        row = table()[begins]
        assert_as_the_row_says(each, begins, row, NEED[row.need], told)
        assert_guarded(each, begins, told)
    # what the page says of what does not guard
    assert set(open_to_infer0) == stores and len(stores) == 3
    assert len(routed) >= 4 and REFUSED not in routed.values()
    assert all("Permission denied" in said for said in logins)


def test_ports_of_a_run_with_servers_of_its_own(hosts: Cluster) -> None:
    run_dir, host = hosts.folder / "own", hosts.trainers[0]
    held = Held(run_dir)
    started = hosts.start_alone(host, run_dir, NUM_PROMPTS, held.setting)
    held.begin(num_ranks=1)
    found = find(host)
    told = ask(hosts, found)
    held.end([started])
    assert set(found.values()) == OF_ONE_HOST
    for each, begins in found.items():
        assert each.address == LOOPBACK, each
        assert_as_the_row_says(each, begins, table()[begins], (), told)
        assert_guarded(each, begins, told)


def login(host: Host, to: str) -> str:
    """What ssh says to ``host``, which has no key."""
    address = next(own for network, own in HOSTS[to].items() if network in HOSTS[host.name])
    options = "-o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    return host.run("bash", "-c", f"ssh {options} root@{address} true 2>&1 || true")


def through(stranger: Host, node: str, found: Found) -> dict[tuple[str, int], str]:
    """What ``stranger`` gets at the inner addresses of ``node``, to which it sets a route."""
    inner, outer = HOSTS[node]["cluster"], HOSTS[node]["office"]
    stranger.run("ip", "route", "add", f"{inner}/32", "via", outer)
    try:
        at = {(inner, each.port) for each in found if each.host == node and each.address == inner}
        return answers(stranger, at)
    finally:
        stranger.run("ip", "route", "del", f"{inner}/32")
