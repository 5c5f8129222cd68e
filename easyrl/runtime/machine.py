"""Ports, processors, memory and open files of this machine."""

from __future__ import annotations

import os
import random
import resource
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LOWEST_PORT = 10_000  # below are those of well-known services
ENOUGH_PORTS, NUM_PORT_TRIES = 1000, 20


def free_port() -> int:
    """A loopback port that nothing listens on now.

    Not one of those that the system gives to connections by itself, if there are others: until the
    port is listened on, another process may be given it.
    """
    first_given = _first_given_port()
    ports = range(LOWEST_PORT, first_given)
    if len(ports) >= ENOUGH_PORTS:
        for port in random.SystemRandom().sample(ports, NUM_PORT_TRIES):
            with suppress(OSError), socket.create_server(("127.0.0.1", port)):
                return port
    with socket.create_server(("127.0.0.1", 0)) as listener:
        given: int = listener.getsockname()[1]
    return given


def _first_given_port() -> int:
    """Of those that the system gives to connections by itself; 0: it does not say."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def url_host(host: str) -> str:
    """``host`` as a URL has it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def usable_cpus() -> list[int]:
    """Numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pin_process(pid: int, cpus: Sequence[int]) -> None:
    """Restricts a process to ``cpus``, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, cpus)


def allow_open_files() -> None:
    """As many as the system lets this process have, by default 1024; a connection is one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit_memory(share: float) -> int | None:
    """What this process allocates beyond ``share`` of the machine's memory is a ``MemoryError``.

    Returns how many bytes that is. On Linux; elsewhere there is no such limit, and None.
    """
    if sys.platform != "linux":
        return None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Data, not address space: threads reserve gigabytes of that and never use them.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = int(share * total)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit
