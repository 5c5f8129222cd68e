"""A JSON request of a reward to servers that can answer it, repeated until the time is up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from pydantic import AfterValidator, Field

from easyrl.config.inference import endpoint_url, variable_name
from easyrl.inference_client.api_keys import KeyErasure, read_variable

MAX_ANSWER_BYTES = 16 * 2**20
QUOTED_CHARACTERS = 300  # of an answer, in a message
LATER = (408, 429)  # 4xx that say "later", not "never"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
OWN_SHARE = 0.9  # of a call's time, so that its error is heard before its worker is killed


def base_url(url: str) -> str:
    """``url`` if it can be a server's. Raises ``ValueError`` without showing a key in it."""
    try:
        return endpoint_url(url)
    except ValueError as error:
        raise ValueError(str(error).replace("inference.api_key_env", "api_key_env")) from None


def request_url(url: str) -> str:
    """``url`` if a request can go there. Raises ``ValueError`` without showing a key in it."""
    if "@" in url:
        raise ValueError("a URL with a user name; name its key's variable in api_key_env")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("is no http:// or https:// URL; write it as http://host:9000/score")
    return url


BaseUrls = Annotated[
    list[Annotated[str, AfterValidator(base_url)]], Field(min_length=1)
]  # of servers with routes of their own
Urls = Annotated[list[Annotated[str, AfterValidator(request_url)]], Field(min_length=1)]
Variable = Annotated[str, AfterValidator(variable_name)]


class RequestFailed(RuntimeError):
    """No server gave an answer that can be used; says which, and why."""


class _TryAgain(Exception):
    """This server has no answer now."""


async def post_json(
    urls: Sequence[str],
    body: Mapping[str, Any],
    *,
    api_key_env: str | None,
    timeout_s: float,
    first: int = 0,
    no_route: str = "correct its URL",
) -> tuple[str, Any]:
    """The URL that answered ``body``, and its answer as JSON.

    Begins with ``urls[first % len(urls)]``. A connection that fails, 408, 429 and 5xx are tried
    again, at the next URL, until ``timeout_s`` is nearly over; any other status is final.

    Args:
        api_key_env: environment variable with the bearer token; None: none is sent.
        no_route: what to do where the server does not know the route (404, 405).

    Raises ``RequestFailed``, or ``ValueError`` if the variable is not set.
    """
    key = None if api_key_env is None else read_variable(api_key_env, "api_key_env")
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    # a record out of a table may hold dates; what is not a number has no form in JSON
    data = orjson.dumps(body, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
    deadline_s = time.monotonic() + OWN_SHARE * timeout_s
    cause, attempt = "", 0
    async with aiohttp.ClientSession(headers=headers) as session:
        while True:
            url = urls[(first + attempt) % len(urls)]
            attempt += 1
            left_s = deadline_s - time.monotonic()
            try:
                # a server that hangs leaves time for another one
                limit_s = left_s / 2 if len(urls) > 1 else left_s
                content = await _post(session, url, data, limit_s, no_route)
                return url, json.loads(content)
            except _TryAgain as error:
                cause = str(error)
            except RequestFailed as error:
                raise RequestFailed(KeyErasure(key).of(str(error))) from None
            except (ValueError, RecursionError):
                shown = KeyErasure(key).of(_quoted(content))
                raise RequestFailed(f"{url} answers no JSON: {shown}") from None
            rounds = (attempt - 1) // len(urls)
            pause_s = min(FIRST_PAUSE_S * 2.0**rounds, LONGEST_PAUSE_S)
            if time.monotonic() + pause_s >= deadline_s:
                raise RequestFailed(
                    f"no answer within {timeout_s:g} s in {attempt} requests; the last: "
                    f"{KeyErasure(key).of(cause)}"
                )
            await asyncio.sleep(pause_s)


async def _post(
    session: aiohttp.ClientSession,
    url: str,
    data: bytes,
    limit_s: float,
    no_route: str,
) -> bytes:
    timeout = aiohttp.ClientTimeout(total=max(limit_s, 0.01))
    content = b""
    try:
        async with session.post(url, data=data, timeout=timeout, allow_redirects=False) as response:
            async for part in response.content.iter_any():
                content += part
                if len(content) > MAX_ANSWER_BYTES:
                    raise RequestFailed(f"{url} answers with more than {MAX_ANSWER_BYTES} bytes")
            status = response.status
    except TimeoutError:
        raise _TryAgain(f"{url} gave no answer within {limit_s:.3g} s") from None
    except aiohttp.ClientError as error:
        raise _TryAgain(f"{url}: {error or type(error).__name__}") from None
    if status == 200:
        return content
    problem = f"{url} answers {status}: {_quoted(content)}"
    if status >= 500 or status in LATER:
        raise _TryAgain(problem)
    remedy = ""
    if status in (404, 405):
        remedy = f"; {no_route}"
    elif status in (401, 403):
        remedy = "; set kwargs.api_key_env to the variable that holds its key"
    raise RequestFailed(problem + remedy)


def _quoted(content: bytes) -> str:
    text = " ".join(content[:QUOTED_CHARACTERS].decode(errors="replace").split())
    return "".join(c if c.isprintable() else "?" for c in text) or "nothing"
