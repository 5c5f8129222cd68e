"""The beginning of what a client of torch's ``TCPStore`` says: enough to tell a store by.

Source: ``TCPStoreBackend.hpp`` and ``TCPStoreLibUvBackend.cpp`` of PyTorch 2.13.
"""

from __future__ import annotations

import socket
import struct

HELLO = b"\x00" + struct.pack("<I", 0x3C85F7CE)  # the query VALIDATE and its number
PING = 13  # a query with a number, which comes back
NUMBER = struct.pack("<I", 0x6C72)
ANSWER_S = 2.0


def is_store(host: str, port: int) -> bool:
    """Whether a ``TCPStore`` listens there: it sends a ping's number back."""
    try:
        with socket.create_connection((host, port), ANSWER_S) as connection:
            connection.sendall(HELLO + bytes([PING]) + NUMBER)
            return connection.recv(len(NUMBER)) == NUMBER
    except OSError:
        return False
