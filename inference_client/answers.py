"""What an endpoint answers: read under a bound, decoded into typed records, quoted in messages.

The only place where bytes of an endpoint become records, for every route. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Literal, TypeVar

import aiohttp
import msgspec

from easyrl.inference_client.errors import MalformedResponse

T = TypeVar("T")

ANSWER_BYTES = 4 * 2**20  # more than /metrics of a server with many engines takes
RESPONSE_BYTES = 2**16  # of a response beside its tokens
ERROR_BYTES = 8 * 2**10  # that are read of an answer that is not 200
# vLLM writes at most 210 for a token: its id twice more, log-probability and rank twice
BYTES_PER_TOKEN = 512
# the slices of a tensor that a worker serves, 200 bytes each, or what is wrong; besides its name
BYTES_PER_TENSOR = 1024
MAX_WORKERS = 32  # of one server, tensor times pipeline parallel
QUOTED_CHARACTERS = 500  # of what it sent, in a message

Word = Annotated[str, msgspec.Meta(max_length=4096)]  # a name, a path, a version
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # int32, as the arrays that it goes into


async def read_body(
    response: aiohttp.ClientResponse, encoding: str, url: str, route: str, max_bytes: int
) -> bytes:
    """The body, of an error its beginning. Raises as ``body_parts`` does."""
    return b"".join([part async for part in body_parts(response, encoding, url, route, max_bytes)])


async def body_parts(
    response: aiohttp.ClientResponse, encoding: str, url: str, route: str, max_bytes: int
) -> AsyncIterator[bytes]:
    """The body as it comes. Raises ``MalformedResponse`` beyond ``max_bytes``.

    Of an error its beginning. ``encoding``: as the headers have it. A compressed body is refused,
    not decompressed under the bound: we asked for none, since on a cluster's network packing takes
    longer than sending.
    """
    succeeded = response.status == 200
    if encoding.lower() != "identity":
        reason = f"{route}: compressed ({shorten(encoding, 50)}), asked for identity"
        raise MalformedResponse(url, reason)
    num_bytes, limit = 0, max_bytes if succeeded else ERROR_BYTES
    async for part in response.content.iter_any():
        num_bytes += len(part)
        if num_bytes > limit:
            response.close()
            if succeeded:
                reason = f"{route}: more than {max_bytes} bytes, which nothing asked for can take"
                raise MalformedResponse(url, reason)
            yield part
            break
        yield part


def decode(
    decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T],
    content: bytes,
    url: str,
    route: str,
    *,
    form: Literal["JSON", "MessagePack"] = "JSON",
) -> T:
    """``content`` as a record. Raises ``MalformedResponse`` naming route and field."""
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        reason = f"unexpected shape of the answer: {error}"
    except RecursionError:
        reason = "nested too deeply"
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:  # UnicodeDecodeError too
        reason = f"not {form} ({len(content)} bytes, truncated?): {error}"
    raise MalformedResponse(url, f"{route}: {shorten(reason)}: {shorten(content)}")


def shorten(text: str | bytes, limit: int = QUOTED_CHARACTERS) -> str:
    """At most ``limit`` characters of what an endpoint sent, all printable."""
    if isinstance(text, bytes):
        text = text[: 4 * limit].decode(errors="replace")
    text = text.strip() or "(empty body)"
    cut = text if len(text) <= limit else text[:limit] + " ..."
    # no escape sequence reaches a terminal, no lone surrogate a file in UTF-8
    return cut if cut.isprintable() else "".join(c if c.isprintable() else " " for c in cut)
