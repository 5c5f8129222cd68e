"""Bearer tokens of the endpoints, by URL: each is sent to its own endpoint and to no other."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from easyrl.config import InferenceConfig

# A shorter key, or a number, may be a part of any good answer: of a name, a digest, a token id.
SHORTEST_SECRET = 8
ERASED = "[key]"


class ApiKeys:
    """The token of each endpoint; shared by all that send requests, whatever thread they are in.

    Args:
        by_url: of endpoints that have one of their own.
        default: of all others; None: they get no token.
    """

    def __init__(self, by_url: Mapping[str, str] | None = None, default: str | None = None) -> None:
        self._by_url: dict[str, str | None] = dict(by_url or {})
        self._default = default

    @classmethod
    def read(cls, config: InferenceConfig) -> ApiKeys:
        """From the environment variables that ``config`` names. Raises ``ValueError``."""
        default = config.api_key_env
        own = {
            endpoint.url: read_variable(
                endpoint.api_key_env, f"inference.endpoints[{i}].api_key_env"
            )
            for i, endpoint in enumerate(config.endpoints)
            if endpoint.api_key_env is not None
        }
        return cls(
            own, None if default is None else read_variable(default, "inference.api_key_env")
        )

    def of(self, url: str) -> str | None:
        """The token for ``url``; None if it is sent none."""
        return self._by_url.get(url, self._default)

    def learn(self, url: str, api_key: str | None) -> None:
        """From now on ``url`` is sent ``api_key``."""
        self._by_url[url] = api_key

    def __repr__(self) -> str:  # never the tokens
        return f"ApiKeys of {sorted(self._by_url)}"


class KeyErasure:
    """Replaces ``key`` in bytes and texts: as it is, or escaped as JSON and URLs may have it.

    For servers that repeat the request's headers in an error, a status line or a redirect: what an
    endpoint sends comes into logs and files. One that means to give its own key away can always
    write it in a way that nobody finds.
    """

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


def new_api_key() -> str:
    """A random token, 256 bits."""
    return secrets.token_urlsafe(32)


def read_variable(name: str, key: str) -> str:
    """The token in environment variable ``name``. Raises ``ValueError`` beginning with ``key``.

    The message never has the token. One that no header can carry as it is, is refused: RFC 6750
    allows less.
    """
    if value := os.environ.get(name):
        if not (value.isascii() and value.isprintable() and value == value.strip()):
            raise ValueError(
                f"{key}: the environment variable {name} holds a key with a line break, another "
                "character that is not printable ASCII, or a space around it; export it without "
                f'({name}="$(cat FILE)" leaves off the line break at the end)'
            )
        return value
    raise ValueError(
        f"{key}: the environment variable {name} is not set; export it with the endpoint's key "
        "before the run starts, or name another one"
    )


def _any_spelling(character: str) -> str:
    r"""A pattern of ``a`` as ``a``, ``\u0061`` or ``%61``, of ``/`` as ``\/`` too."""
    code = ord(character)
    return rf"(?:\\?{re.escape(character)}|\\u(?i:{code:04x})|%(?i:{code:02x}))"
