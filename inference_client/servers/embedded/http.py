"""Bodies, answers, errors and the key: what all routes of the embedded server share."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from easyrl.inference_client.servers.embedded.requests import BadRequestError, UnavailableError

OPEN_ROUTES = frozenset({"/health", "/metrics"})  # as vLLM: probes have no key
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Middleware = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]
Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")


async def parse(http: web.Request, body: type[Body]) -> Body:
    """The validated body; an empty one counts as ``{}``. Raises ``ValidationError``."""
    raw = await http.read()
    try:
        data = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise BadRequestError("body", f"is not JSON ({error})") from None
    return body.model_validate(data)


async def done(future: Future[T]) -> T:
    """The result of a command; its ``ValueError`` is the caller's mistake."""
    try:
        return await asyncio.wrap_future(future)
    except BadRequestError:
        raise
    except ValueError as error:
        raise web.HTTPBadRequest(text=str(error)) from None


def json_response(content: dict[str, Any], status: int = 200) -> web.Response:
    body = orjson.dumps(content)
    return web.Response(body=body, status=status, content_type="application/json")


def _error(status: int, kind: str, message: str, param: str | None = None) -> web.Response:
    error = {"message": message, "type": kind, "param": param, "code": status}
    return json_response({"error": error}, status)


@web.middleware
async def errors(http: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as OpenAI's clients expect them."""
    try:
        return await handler(http)
    except ValidationError as error:
        return _error(400, "BadRequestError", *_validation_problem(error))
    except BadRequestError as error:
        return _error(400, "BadRequestError", str(error), error.param)
    except UnavailableError as error:
        return _error(503, "ServiceUnavailableError", str(error))
    except web.HTTPException as error:
        return _error(error.status, type(error).__name__[4:] + "Error", error.text or error.reason)


def _validation_problem(error: ValidationError) -> tuple[str, str | None]:
    """Message and field of a bad body; a field with alternatives is named once."""
    problems: dict[str, str] = {}
    for item in error.errors(include_url=False, include_input=False):
        path = [str(part) for part in item["loc"] if "[" not in str(part)]
        path = [part for part in path if part not in ("str", "int")]
        problems.setdefault(".".join(path), item["msg"].removeprefix("Value error, "))
    shown = list(problems.items())[:10]
    message = "; ".join(f"{field}: {text}" if field else text for field, text in shown)
    return message, next(iter(problems)) or None


def authentication(api_key: str) -> Middleware:
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def check(http: web.Request, handler: Handler) -> web.StreamResponse:
        given = http.headers.get("Authorization", "").encode()
        if http.path in OPEN_ROUTES or hmac.compare_digest(given, expected):
            return await handler(http)
        return json_response({"error": "Unauthorized"}, 401)

    return check
