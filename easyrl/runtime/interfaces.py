"""Addresses and network interfaces of this host."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def local_address(host: str, port: int = 80) -> str:
    """This host's address on the way to ``host``. Raises ``OSError`` if there is none."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing, only chooses the way
        return str(probe.getsockname()[0])


def own_address(host: str) -> str | None:
    """The address of this host that ``host`` stands for; None if it is another's, or unknown."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    # IPv4 first: who comes from elsewhere may have nothing else
    for family, kind, _, _, target in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(target)
            except OSError:
                continue
            return str(target[0])
    return None


def interface_of(address: str) -> str | None:
    """Name of the network interface that has ``address``; None if it is no one's."""
    for name, own in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in own):
            return name
    return None


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
