"""The recording gateway as the trainer sees it: its process, and the sessions open there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from easyrl.config import SamplingConfig
from easyrl.episodes.session import Session, SessionLost, TurnRefused
from easyrl.gateway.messages import (
    Answer,
    Ask,
    Close,
    Open,
    Order,
    Ready,
    Refused,
    Settings,
    decode_requests,
    encode,
)
from easyrl.gateway.process import ENTRY
from easyrl.runtime.workers.child_process import END_LIMIT_S
from easyrl.runtime.workers.reporting_child import ReportingChild

log = logging.getLogger(__name__)

SAMPLING_FIELDS = set(SamplingConfig.model_fields)


class GatewayChild(ReportingChild):
    """One gateway process at a time. Every method belongs to the producer's loop.

    What it asks for is sampled and recorded by the session here; only then is it answered. If the
    process ends, its sessions are lost (``SessionLost``), and the next session starts another.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(ENTRY, encode(settings))
        self._sessions: dict[str, Session] = {}
        self._ready: asyncio.Future[tuple[int, str | None]] | None = None  # of the process
        self._turns: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serves(self, session: Session) -> AsyncIterator[str]:
        """Inside, ``session`` is open at the URL; it fails if the process ends (``SessionLost``).

        Raises ``SessionLost`` if none comes up.
        """
        port, _ = await self._started()
        child = self.child
        self._sessions[session.id] = session
        sampling = session.sampling.model_dump_json(include=SAMPLING_FIELDS)
        self.post(Open(session.id, session.key, sampling.encode()))
        try:
            yield f"http://127.0.0.1:{port}/sessions/{session.id}"
        finally:
            if self.child is child and not self.alive:
                # it has ended, and clients have heard of it before ``on_end``: not their failure
                await asyncio.wait([session.failed], timeout=END_LIMIT_S)
            if self._sessions.pop(session.id, None) is not None:  # else the process has ended
                self.post(Close(session.id))

    async def start(self) -> str | None:
        """Returns when it serves: why its chat template cannot continue sampled tokens exactly.

        Raises ``SessionLost`` if it does not come up.
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
        for turn in list(self._turns):
            turn.cancel()
        await super().close()

    def on_message(self, payload: bytes) -> None:
        super().on_message(payload)
        for request in decode_requests(payload):
            if isinstance(request, Ready):
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result((request.port, request.template_problem))
                continue
            turn = asyncio.get_running_loop().create_task(self._turn(request))
            self._turns.add(turn)
            turn.add_done_callback(self._turns.discard)

    def on_end(self, how: str) -> None:
        log.warning("the gateway's process ended: %s; %d episodes", how, len(self._sessions))
        sessions, self._sessions = self._sessions, {}
        ready, self._ready, self._outbox = self._ready, None, []
        lost = SessionLost(f"the gateway's process ended: {how}")
        for session in sessions.values():
            session.fail(lost)
        if ready is not None and not ready.done():
            ready.set_exception(lost)
            ready.exception()

    async def _turn(self, asked: Ask) -> None:
        session, child = self._sessions.get(asked.session), self.child
        try:
            if session is None:
                raise TurnRefused(410, "the episode has ended")
            prompt_ids = np.frombuffer(asked.prompt_ids, np.int32)
            made = await session.turn(
                prompt_ids, asked.max_tokens, asked.stop, asked.stop_token_ids
            )
        except TurnRefused as error:
            answer: Order = Refused(asked.number, error.status, str(error))
        else:
            answer = Answer.of(asked.number, made)
        if child is self.child:  # else it is a number of another process's
            self.post(answer)
