"""What the trainer's process was asked and has not answered."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from easyrl.completion_check import Vocabulary
from easyrl.gateway.errors import GatewayError
from easyrl.gateway.history import AnsweredTurn
from easyrl.gateway.leased_requests import LeasedRequests
from easyrl.gateway.messages import Answer, Ask, Came, Recorded, Refused
from easyrl.gateway.requests import Limits
from easyrl.gateway.sessions import Session
from easyrl.schema import VersionSpan


@dataclass(frozen=True, slots=True, eq=False)
class SampledTurn:
    """A turn as the trainer's process has recorded it."""

    new_ids: np.ndarray  # int32, of the prompt what its parent has not
    token_ids: np.ndarray  # int32 [R]
    logprobs: np.ndarray  # float32 [R]
    finish_reason: str
    version_spans: tuple[VersionSpan, ...]
    id: str  # by which its environment may reward it
    created: int = field(default_factory=lambda: int(time.time()))
    parent: AnsweredTurn | None = None  # whose ids the prompt begins with; they are kept once

    @property
    def prompt_ids(self) -> np.ndarray:
        """int32 [P]"""
        if self.parent is None:
            return self.new_ids
        return np.concatenate([self.parent.ids, self.new_ids])


class Questions:
    """Turns that are being sampled, by number."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        vocabulary: Vocabulary,
        send: Callable[[Ask | Came], object],
    ) -> None:
        self._send = send
        self.leased = LeasedRequests(http, vocabulary, send)
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[str, asyncio.Future[Answer]]] = {}

    async def ask(self, session: Session, prompt_ids: np.ndarray, limits: Limits) -> SampledTurn:
        """What is sampled behind ``prompt_ids``, int32 [P]. Raises ``GatewayError``."""
        number = next(self._numbers)
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = session.id, answered
        ids = np.asarray(prompt_ids, np.int32)
        shorter = limits.max_tokens, limits.stop, limits.stop_token_ids
        ahead = self.leased.begin(number, session, ids, limits)
        self._send(Ask(number, session.id, ids.tobytes(), *shorter, ahead))
        try:
            answer = await answered
        finally:
            self._waiting.pop(number, None)
        return SampledTurn(
            ids,
            np.frombuffer(answer.token_ids, np.int32),
            np.frombuffer(answer.logprobs, np.float32),
            answer.finish_reason,
            answer.version_spans,
            answer.turn,
        )

    def answered(self, told: Answer | Recorded | Refused) -> None:
        """One that nobody waits for any more is ignored."""
        response = self.leased.take(told.number)
        if isinstance(told, Recorded):
            assert response is not None
            told = Answer.of(told.number, response, told.turn)
        _, future = self._waiting.get(told.number, (None, None))
        if future is None or future.done():
            return
        if isinstance(told, Answer):
            future.set_result(told)
        else:
            future.set_exception(GatewayError(told.status, told.message, code=told.code))

    def end_of(self, session: str, error: GatewayError) -> None:
        """Nothing of ``session`` is waited for any more."""
        for asked_by, future in list(self._waiting.values()):
            if asked_by == session and not future.done():
                future.set_exception(error)
