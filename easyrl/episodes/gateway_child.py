"""The recording gateway as the trainer sees it: its process, and the sessions open there."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from easyrl.config import SamplingConfig
from easyrl.episodes.session import Session, SessionLost, TurnRefused
from easyrl.episodes.turns import TurnRecord
from easyrl.gateway.messages import (
    Answer,
    Ask,
    Came,
    Close,
    Closed,
    Drop,
    Failed,
    Lease,
    Lend,
    Open,
    Order,
    Ready,
    Recorded,
    Refused,
    Settings,
    Working,
    decode_requests,
    encode,
)
from easyrl.gateway.process import ENTRY
from easyrl.inference_client import errors
from easyrl.inference_client.fetching.fetcher import ENVIRONMENT
from easyrl.inference_client.fetching.messages import Fetched
from easyrl.inference_client.pool.asked_ahead import AskedAhead
from easyrl.runtime.workers.child_process import END_LIMIT_S, Child
from easyrl.runtime.workers.reporting_child import ReportingChild
from easyrl.schema import GatewayGone

log = logging.getLogger(__name__)

MAX_STARTS = 3  # of a process that does not come up in mid-run
RESTART_AFTER_S = 1.0
SAMPLING_FIELDS = set(SamplingConfig.model_fields)


class GatewayChild(ReportingChild):
    """One gateway process at a time. Every method belongs to the producer's loop.

    What it asks for is sampled and recorded by the session here; only then is it answered. If the
    process ends, its sessions are lost (``SessionLost``): those are suspects of which a long
    request was worked on, else all. The next session starts another process: if that does not come
    up, once more, ``MAX_STARTS`` times in all.

    Where a session is lent a place at an endpoint, the process asks that itself for the next turn,
    at once, and tells of it (``AskedAhead``): what comes back is checked and recorded here as any
    other response, before it is answered. Not once a process has died: what it was sent may have
    been the reason, and fetchers find out whose answer that was (``Suspects``).
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(ENTRY, encode(settings), ENVIRONMENT)
        self.tool_parser: str | None = None  # that it has chosen; None: none reads the template's
        self._sessions: dict[str, Session] = {}
        self._ready: asyncio.Future[tuple[int, str | None]] | None = None  # of the process
        self._ahead: dict[int, AskedAhead] = {}  # by number of the ``Ask``
        self._leases: dict[str, Lease] = {}  # as sessions have them
        self._closing: dict[str, asyncio.Future[None]] = {}  # sessions
        self._lends = True
        self._working: Counter[str] = Counter()  # long requests that are worked on, by session
        self._has_served = self._is_closed = False
        self._num_failed_starts = 0  # one after another

    @asynccontextmanager
    async def serves(self, session: Session) -> AsyncIterator[str]:
        """Inside, ``session`` is open at the URL; it fails if the process ends (``SessionLost``).

        Raises ``GatewayGone`` if none comes up.
        """
        port, _ = await self._started()
        child = self.child
        self._sessions[session.id] = session
        sampling = session.sampling.model_dump_json(include=SAMPLING_FIELDS)
        said = session.id, session.key, sampling.encode(), session.history
        self.post(Open(*said, session.max_turns, session.seed))
        self._lend(session)
        try:
            yield f"http://127.0.0.1:{port}/sessions/{session.id}"
        finally:
            if self.child is child and not self.alive:
                # it has ended, and clients have heard of it before ``on_end``: not their failure
                await asyncio.wait([session.failed], timeout=END_LIMIT_S)
            self._leases.pop(session.id, None)
            try:
                if self.child is child and session.id in self._sessions:  # else it has ended
                    await self._closed(session)
            finally:
                self._sessions.pop(session.id, None)

    async def _closed(self, session: Session) -> None:
        """Returns when all is known here that it has asked for, or its process has ended."""
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing[session.id] = closed
        self.post(Close(session.id))
        try:
            await asyncio.wait([closed, session.failed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._closing[session.id]

    async def start(self) -> str | None:
        """Returns when it serves: why its chat template cannot continue sampled tokens exactly.

        Raises ``GatewayGone`` if it does not come up.
        """
        _, problem = await self._started()
        return problem

    async def _started(self) -> tuple[int, str | None]:
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
        self.ensure_started()
        return await asyncio.shield(self._ready)

    def batch(self, messages: Sequence[Order]) -> bytes:
        return encode(messages)

    async def close(self) -> None:
        self._is_closed = True
        await super().close()
        self._give_up_ahead()
        for closed in self._closing.values():
            closed.cancel()

    def on_message(self, payload: bytes) -> None:
        super().on_message(payload)
        for request in decode_requests(payload):
            if isinstance(request, Ready):
                self._has_served, self._num_failed_starts = True, 0
                self.tool_parser = request.tool_parser
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result((request.port, request.template_problem))
                continue
            if isinstance(request, Came):
                self._came(request.reply)
                continue
            if isinstance(request, Closed):
                if (closed := self._closing.get(request.session)) is not None:
                    closed.set_result(None)
                continue
            if isinstance(request, Working):
                self._working[request.session] += 1 if request.goes_on else -1
                continue
            self._ask(request)

    def on_end(self, how: str) -> None:
        log.warning("the gateway's process ended: %s; %d episodes", how, len(self._sessions))
        self._outbox, self._leases, self._lends = [], {}, False
        self._give_up_ahead()
        if self._ready is not None and not self._ready.done():
            self._on_failed_start(self._ready, how)
            return
        sessions, self._sessions, self._ready = self._sessions, {}, None
        working, self._working = +self._working, Counter()  # those above zero
        suspects = working.keys() & sessions.keys() or sessions.keys()
        for session in sessions.values():
            is_suspect = session.id in suspects
            session.fail(SessionLost(f"the gateway's process ended: {how}", is_suspect=is_suspect))

    def _on_failed_start(self, ready: asyncio.Future[Any], how: str) -> None:
        """Tries again if it has served before; else whoever waits for ``ready`` is told."""
        self._num_failed_starts += 1
        if self._has_served and self._num_failed_starts < MAX_STARTS:
            asyncio.get_running_loop().call_later(RESTART_AFTER_S, self._start_again)
            return
        times = f" {MAX_STARTS} times" if self._has_served else ""
        self._ready, self._num_failed_starts = None, 0
        ready.set_exception(
            GatewayGone(
                f"environments: the gateway's process could not be started{times}: {how}; what it "
                "said stands above; it needs memory, a free port and model.tokenizer"
            )
        )
        ready.exception()

    def _start_again(self) -> None:
        if not self._is_closed:
            self.ensure_started()

    # ---- turns -----------------------------------------------------------------------------------

    def _lend(self, session: Session) -> None:
        """Tells the gateway which endpoint ``session`` may ask by itself from now on."""
        lease = session.lease(partial(self._recall, session.id)) if self._lends else None
        if lease is None:
            self._recall(session.id)
        elif lease != self._leases.get(session.id):
            self._leases[session.id] = lease
            self.post(Lend(session.id, lease))

    def _recall(self, session: str) -> None:
        if self._leases.pop(session, None) is not None:
            self.post(Lend(session, None))

    def _ask(self, asked: Ask) -> None:
        session, child = self._sessions.get(asked.session), self.child
        ahead = self._asked_ahead(asked)
        answer = partial(self._answer, asked.number, session, child, ahead)
        try:
            if session is None:
                raise TurnRefused(410, "the episode has ended")
            prompt_ids = np.frombuffer(asked.prompt_ids, np.int32)
            shorter = asked.max_tokens, asked.stop, asked.stop_token_ids
            session.begin_turn(prompt_ids, *shorter, ahead).add_done_callback(
                lambda turn: None if turn.cancelled() else answer(turn.exception() or turn.result())
            )
        except TurnRefused as error:
            answer(error)

    def _answer(
        self,
        number: int,
        session: Session | None,
        child: Child | None,
        ahead: AskedAhead | None,
        made: TurnRecord | BaseException,
    ) -> None:
        if child is not self.child:  # it is a number of another process's
            return
        if ahead is not None:
            ahead.drop()
            del self._ahead[number]
        if isinstance(made, TurnRecord):
            if ahead is not None and ahead.is_answer(made.completion):
                self.post(Recorded(number, made.id))
            else:
                self.post(Answer.of(number, made.completion, made.id))
        elif isinstance(made, TurnRefused):
            self.post(Refused(number, made.status, str(made), made.code))
        else:
            raise made
        if session is not None:
            self._lend(session)

    def _give_up_ahead(self) -> None:
        """The process is gone: what it has sent is sent again, by a fetcher."""
        for ahead in self._ahead.values():
            ahead.answered(None)
        self._ahead = {}

    def _came(self, reply: Fetched | Failed) -> None:
        if (ahead := self._ahead.get(reply.number)) is None:
            return  # dropped
        if isinstance(reply, Fetched):
            ahead.answered(reply.completion(ahead.url))
        else:
            ahead.answered(_error(ahead.url, reply))

    def _asked_ahead(self, asked: Ask) -> AskedAhead | None:
        if asked.ahead is None:
            return None
        sent, forget = asked.ahead, partial(self.post, Drop(asked.number))
        ahead = AskedAhead(sent.url, sent.seed, sent.max_tokens, sent.began_s, forget)
        self._ahead[asked.number] = ahead
        return ahead


def _error(url: str, failed: Failed) -> Exception:
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.EndpointError):
        if kind.__init__ is errors.EndpointError.__init__:
            return kind(url, failed.reason)
        return errors.EndpointUnavailable(url, failed.reason)
    return RuntimeError(f"{failed.kind}: {failed.reason}")
