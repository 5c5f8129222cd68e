"""Addresses and network interfaces by which this host reaches others."""

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


def interface_of(address: str) -> str | None:
    """Name of the network interface that has ``address``; None if it is no one's."""
    for name, own in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in own):
            return name
    return None


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
