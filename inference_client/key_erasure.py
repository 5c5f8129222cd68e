"""Takes an endpoint's key out of what the endpoint sends, which comes into logs and files.

For servers that repeat the request's headers in an error, a status line or a redirect. One that
means to give its own key away can always write it in a way that nobody finds.
"""

from __future__ import annotations

import re

# A shorter key, or a number, may be a part of any good answer: of a name, a digest, a token id.
SHORTEST_SECRET = 8
ERASED = "[key]"


class KeyErasure:
    """Replaces ``key`` in bytes and texts: as it is, or escaped as JSON and URLs may have it."""

    def __init__(self, key: str | None) -> None:
        self._pattern: re.Pattern[str] | None = None
        if key is None or len(key) < SHORTEST_SECRET or key.isdecimal():
            return
        pattern = "".join(map(_any_spelling, key))
        self._pattern = re.compile(pattern)
        self._in_bytes = re.compile(pattern.encode())
        self._plain = key.encode()

    def of(self, text: str) -> str:
        return text if self._pattern is None else self._pattern.sub(ERASED, text)

    def of_bytes(self, content: bytes) -> bytes:
        """The same of a body, at the speed of a copy where nothing in it is escaped."""
        if self._pattern is None:
            return content
        content = content.replace(self._plain, ERASED.encode())
        if b"\\" in content or b"%" in content:
            content = self._in_bytes.sub(ERASED.encode(), content)
        return content


def _any_spelling(character: str) -> str:
    r"""A pattern of ``a`` as ``a``, ``\u0061`` or ``%61``, of ``/`` as ``\/`` too."""
    code = ord(character)
    return rf"(?:\\?{re.escape(character)}|\\u(?i:{code:04x})|%(?i:{code:02x}))"
