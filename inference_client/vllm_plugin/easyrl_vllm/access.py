"""A bearer token for all of vLLM's routes (``--middleware easyrl_vllm.access.RequireApiKey``).

vLLM's own ``--api-key`` leaves the routes open that take weights, pause and run methods of workers.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

API_KEY_VARIABLE = "EASYRL_API_KEY"  # of the environment: a command line can be read by everyone
OPEN_ROUTES = frozenset({"/health", "/metrics"})  # probes have no key

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

UNAUTHORIZED = b'{"error": "Unauthorized"}'


class RequireApiKey:
    """ASGI middleware: 401 for what does not show the token, but ``OPEN_ROUTES``.

    Raises ``ValueError`` if the environment has no token: a guard that lets everyone in would not
    be noticed.
    """

    def __init__(self, app: App) -> None:
        key = os.environ.get(API_KEY_VARIABLE)
        if not key:
            raise ValueError(
                f"{API_KEY_VARIABLE}: is not set; export the key that requests have to show, or "
                "start the server without easyrl_vllm.access.RequireApiKey"
            )
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it was accepted: 403
        else:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(UNAUTHORIZED)).encode()),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": UNAUTHORIZED})

    def _may_pass(self, scope: Message) -> bool:
        if scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_ROUTES:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
