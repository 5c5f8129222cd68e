"""Who listens where on a host, and whether another host reaches it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass

from tests.hosts.namespaces import Host

WILDCARDS = ("0.0.0.0", "*", "[::]")

# On the host that asks: connects to each address, asks for a page, says what comes back first. A
# reset is a connection that was closed before all of the request was read.
_PROBE = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def ask(place):
    try:
        connection = socket.create_connection(place, timeout=3)
    except OSError as error:
        return type(error).__name__
    try:
        connection.sendall(b"GET /v1/models HTTP/1.0\\r\\n\\r\\n")
        reply = connection.recv(64).decode(errors="replace")
        return reply.splitlines()[0] if reply else "closed"
    except TimeoutError:
        return "silent"
    except ConnectionError:
        return "closed"
places = [tuple(place) for place in json.loads(sys.argv[1])]
print(json.dumps(list(ThreadPoolExecutor(32).map(ask, places))))
"""


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket."""

    host: str
    address: str  # that it is bound to, or a wildcard
    port: int
    pid: int  # of its process, on the host
    command: str


def listeners(host: Host) -> list[Listener]:
    """All of ``host``, as ``ss`` lists them."""
    found = []
    for line in host.run("ss", "-H", "-l", "-t", "-n", "-p").splitlines():
        address, _, port = line.split()[3].rpartition(":")
        process = re.search(r"pid=(\d+)", line)
        assert process is not None, line
        command = host.run("bash", "-c", f"tr '\\0' ' ' < /proc/{process[1]}/cmdline")
        address = address.partition("%")[0]
        found.append(Listener(host.name, address, int(port), int(process[1]), command.strip()))
    return found


def answers(host: Host, places: Collection[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """What ``host`` gets at each address and port without a key: an error's name, or a reply."""
    asked = sorted(places)
    said = host.run(sys.executable, "-c", _PROBE, json.dumps(asked))
    return dict(zip(asked, json.loads(said), strict=True))
