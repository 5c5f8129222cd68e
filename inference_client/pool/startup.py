"""Before the first request: the key, and waiting for the servers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

from easyrl.config import InferenceConfig
from easyrl.inference_client.errors import NoEndpointError
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.outage import status_lines

log = logging.getLogger(__name__)

POLL_S = 0.05
GRACE_S = 5.0  # for the others once one endpoint is healthy


def read_api_key(config: InferenceConfig) -> str | None:
    """The endpoints' bearer token, if they want one. Raises ``ValueError`` if it is not set."""
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ValueError(
            f"inference.api_key_env: the environment variable {config.api_key_env} is not set; "
            "export it with the endpoints' key, or remove inference.api_key_env"
        )
    return key


async def until_up(
    endpoints: Callable[[], Sequence[Endpoint]], limit_s: float, grace_s: float
) -> None:
    """Waits until one of the endpoints is up, and then ``grace_s`` for the others.

    Raises ``NoEndpointError`` with what each answered if none is after ``limit_s``, and
    ``RequestRejected`` at once if one refuses us.
    """
    try:
        async with asyncio.timeout(limit_s):
            await _until(endpoints, any)
    except TimeoutError:
        raise NoEndpointError(
            f"no endpoint is up after {limit_s:g} s (inference.startup_timeout_s):"
            + status_lines(endpoints(), None)
        ) from None
    try:
        async with asyncio.timeout(grace_s):
            await _until(endpoints, all)
    except TimeoutError:
        late = status_lines([e for e in endpoints() if not e.is_up], None)
        log.warning("going on without endpoints that are not up yet:%s", late)


async def _until(
    endpoints: Callable[[], Sequence[Endpoint]], enough: Callable[[Sequence[bool]], bool]
) -> None:
    while not enough([endpoint.is_up for endpoint in endpoints()]):
        for endpoint in endpoints():
            if endpoint.refused is not None:
                raise endpoint.refused
        await asyncio.sleep(POLL_S)
