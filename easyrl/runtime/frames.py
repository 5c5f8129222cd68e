"""Frames: messages in a stream of bytes, each behind four bytes of its length (little-endian)."""

from __future__ import annotations

from collections.abc import Iterator

HEADER_BYTES = 4


class FrameTooLong(ValueError):
    """A header announces ``num_bytes``, more than a frame may have here."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


class FrameSplitter:
    """Cuts a stream of bytes into the payloads of its frames."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes  # of a payload
        self._buffer = bytearray()

    @property
    def num_left(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The payloads that are complete with ``data``.

        Raises ``FrameTooLong`` at the header, when those before it have been given.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while (body := start + HEADER_BYTES) <= len(buffer):
                num_bytes = int.from_bytes(buffer[start:body], "little")
                if self._max_bytes is not None and num_bytes > self._max_bytes:
                    raise FrameTooLong(num_bytes)
                if body + num_bytes > len(buffer):
                    break
                start = body + num_bytes
                yield bytes(memoryview(buffer)[body:start])
        finally:
            del buffer[:start]
