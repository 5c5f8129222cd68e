"""``free_port``: ports that no other process is given before they are listened on."""

from __future__ import annotations

import socket

import pytest

from easyrl.runtime import machine


def test_a_port_is_not_one_that_the_system_gives_to_connections() -> None:
    first_given = machine._first_given_port()
    if first_given < machine.LOWEST_PORT + machine.ENOUGH_PORTS:
        pytest.skip("this system gives nearly all ports to connections")
    ports = {machine.free_port() for _ in range(50)}
    assert all(machine.LOWEST_PORT <= port < first_given for port in ports)
    assert len(ports) > 40  # two processes at once do not choose the same


def test_what_is_listened_on_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = machine.free_port()
    with socket.create_server(("127.0.0.1", taken)):
        free = machine.free_port()
        tries = iter([[taken, free]])
        monkeypatch.setattr("random.SystemRandom.sample", lambda self, ports, k: next(tries))
        assert machine.free_port() == free


def test_where_all_ports_are_given_one_of_these_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_first_given_port", lambda: 1024)
    with socket.create_server(("127.0.0.1", machine.free_port())):
        pass
