"""Sessions: one episode each, with its key, its conversations and its answers by request id."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from easyrl.config import SamplingConfig
from easyrl.gateway.errors import BadRequest, GatewayError
from easyrl.gateway.history import History
from easyrl.gateway.messages import Lease, Open, Settings
from easyrl.gateway.turn_sampling import TurnSeeds

T = TypeVar("T")

MAX_CLOSED = 65_536  # sessions that are remembered as closed; earlier ones are unknown
MAX_ID_CHARACTERS = 256


class Session:
    """An open session. Every method belongs to the server's loop."""

    def __init__(self, opened: Open, max_requests: int) -> None:
        self.id, self.key, self.mode = opened.session, opened.key, opened.history
        self.encoded_sampling = opened.sampling
        self.sampling = SamplingConfig.model_validate_json(opened.sampling)
        self.seeds = TurnSeeds(opened.seed)
        self.max_turns, self.num_asked = opened.max_turns, 0
        self.lease: Lease | None = None
        self.is_asking = False  # an endpoint, by itself
        self.history = History()
        self.used_s = time.monotonic()
        self._max_requests, self._num_requests = max_requests, 0
        self._by_id: dict[str, tuple[bytes, asyncio.Task[Any]]] = {}
        self._turns: set[asyncio.Task[Any]] = set()

    @property
    def is_busy(self) -> bool:
        return self._num_requests > 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Inside, a request is open. Raises ``GatewayError`` where too many are."""
        if self._num_requests >= self._max_requests:
            raise GatewayError(
                429,
                f"the session has {self._num_requests} requests open, as many as it may; wait for "
                "an answer",
            )
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            self.used_s = time.monotonic()

    async def turn(
        self, request_id: str | None, body: bytes, make: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """What ``make`` gives; once for each ``request_id``, also while the first still runs.

        It goes on if nobody waits for it any more. A failure is not kept. Raises ``GatewayError``.
        """
        digest = hashlib.blake2b(body, digest_size=16).digest()
        known = None if request_id is None else self._by_id.get(request_id)
        if known is None:
            task = asyncio.get_running_loop().create_task(make())
            self._turns.add(task)
            task.add_done_callback(lambda _: self._ended(request_id, task))
            if request_id is not None:
                self._by_id[request_id] = digest, task
        elif known[0] != digest:
            raise GatewayError(
                422,
                f"request id {request_id!r} was given to another request of the session; give each "
                "its own, or none",
            )
        else:
            task = known[1]
        return await asyncio.shield(task)

    def _ended(self, request_id: str | None, task: asyncio.Task[Any]) -> None:
        self._turns.discard(task)
        if (task.cancelled() or task.exception() is not None) and request_id is not None:
            self._by_id.pop(request_id, None)


class Sessions:
    """All sessions, by id."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: dict[str, Session] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()  # keys, by session
        self._refused: dict[str, str] = {}  # the same of those for which there was no room

    def open(self, opened: Open) -> None:
        """One beyond ``max_sessions`` is refused when it first asks for something."""
        if len(self._open) >= self._settings.max_sessions:
            self._refused[opened.session] = opened.key
            return
        self._open[opened.session] = Session(opened, self._settings.max_requests)

    def lend(self, session: str, lease: Lease | None) -> None:
        if (lent := self._open.get(session)) is not None:
            lent.lease = lease

    def close(self, session: str) -> None:
        self._refused.pop(session, None)
        if (closed := self._open.pop(session, None)) is not None:
            closed.lease = None  # a request of it may still be read
            self._closed[session] = closed.key
            if len(self._closed) > MAX_CLOSED:
                self._closed.popitem(last=False)

    def idle(self) -> list[str]:
        """Sessions without a request for longer than ``idle_timeout_s``."""
        before_s = time.monotonic() - self._settings.idle_timeout_s
        return [s.id for s in self._open.values() if s.used_s < before_s and not s.is_busy]

    def found(self, name: str | None, authorization: str) -> Session:
        """The open session ``name``. Raises ``GatewayError``: 401, 404, 410 or 503."""
        if not name:
            raise BadRequest(
                "X-Session-Id", "names the session, where the path does not (/sessions/ID/v1/…)"
            )
        session = self._open.get(name)
        key = self._closed.get(name) or self._refused.get(name) if session is None else session.key
        if key is None:
            raise GatewayError(404, f"there is no session {name!r:.80}", code="no_such_session")
        keys = [each for each in (key, self._settings.run_key) if each]
        given = authorization.encode("utf-8", "surrogateescape")
        if not any([hmac.compare_digest(given, f"Bearer {each}".encode()) for each in keys]):
            raise GatewayError(
                401,
                "the session's key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
            )
        if session is not None:
            return session
        if name in self._refused:
            raise GatewayError(
                503, f"{self._settings.max_sessions} sessions are open, as many as may be"
            )
        raise closed_error()


def closed_error() -> GatewayError:
    return GatewayError(410, "the session has ended: its episode is over", code="session_closed")


def checked_request_id(given: str | None) -> str | None:
    """Raises ``BadRequest`` at one that is too long."""
    if given is not None and len(given) > MAX_ID_CHARACTERS:
        raise BadRequest("X-Request-Id", f"has {len(given)} characters, at most 256")
    return given or None
