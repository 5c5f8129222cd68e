"""What the embedded servers' routes share: bodies, errors as OpenAI's clients expect them, keys."""

from __future__ import annotations

import hmac
from typing import Any, TypeVar

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ValidationError

from easyrl.inference_client.servers.embedded.requests import BadRequestError, UnavailableError
from easyrl.inference_client.vllm_plugin.easyrl_vllm.access import OPEN_ROUTES

MAX_BODY_BYTES = 64 * 2**20

Body = TypeVar("Body", bound=BaseModel)


def guarded_application(api_key: str | None) -> web.Application:
    """An application that answers errors as JSON; with ``api_key`` every route but the open ones
    asks for it."""
    middlewares: list[Any] = [] if api_key is None else [authentication(api_key)]
    middlewares.append(errors)
    return web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)


async def parse(http: web.Request, body: type[Body]) -> Body:
    """The validated body; an empty one counts as ``{}``. Raises ``ValidationError``."""
    raw = await http.read()
    try:
        data = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise BadRequestError("body", f"is not JSON ({error})") from None
    return body.model_validate(data)


def json_response(content: dict[str, Any], status: int = 200) -> web.Response:
    body = orjson.dumps(content)
    return web.Response(body=body, status=status, content_type="application/json")


@web.middleware
async def errors(http: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as OpenAI's clients expect them."""
    param = None
    try:
        return await handler(http)
    except ValidationError as error:
        status, kind = 400, "BadRequestError"
        message, param = _validation_problem(error)
    except BadRequestError as error:
        status, kind, message, param = 400, "BadRequestError", str(error), error.param
    except UnavailableError as error:
        status, kind, message = 503, "ServiceUnavailableError", str(error)
    except web.HTTPException as error:
        status, kind = error.status, type(error).__name__[4:] + "Error"
        message = error.text or error.reason
    content = {"message": message, "type": kind, "param": param, "code": status}
    return json_response({"error": content}, status)


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


def authentication(api_key: str) -> Any:
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def check(http: web.Request, handler: Handler) -> web.StreamResponse:
        given = http.headers.get("Authorization", "").encode()
        if http.path in OPEN_ROUTES or hmac.compare_digest(given, expected):
            return await handler(http)
        return json_response({"error": "Unauthorized"}, 401)

    return check
