"""Requests that the recording gateway has sent to an endpoint itself, of which the pool is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from easyrl.config import SamplingConfig
from easyrl.schema import Completion


@dataclass(eq=False, slots=True)
class AskedAhead:
    """One request, under way. It stands for the pool's own where that would be the same.

    Belongs to one loop, as the pool does.
    """

    url: str  # of the endpoint
    seed: int
    max_tokens: int
    began_s: float  # when it was sent, time.monotonic()
    forget: Callable[[], object]  # nobody needs its answer: aborts it
    _answer: asyncio.Future[Completion | None] = field(init=False)
    _is_dropped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._answer = asyncio.get_running_loop().create_future()

    def is_for(self, url: str, sampling: SamplingConfig, seed: int) -> bool:
        """Whether it asks ``url`` for what is to be asked for; all else of ``sampling`` is."""
        asked = self.url, self.max_tokens, self.seed
        return not self._is_dropped and asked == (url, sampling.max_tokens, seed)

    async def answer(self) -> Completion | None:
        """None where nobody will say: it has to be asked for again. Raises ``EndpointError``."""
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.drop()
            raise

    def is_answer(self, made: Completion) -> bool:
        """Whether ``made`` is what its endpoint said."""
        if not self._answer.done() or self._answer.cancelled() or self._answer.exception():
            return False
        said = self._answer.result()
        return said is not None and said.token_ids is made.token_ids

    def answered(self, said: Completion | Exception | None) -> None:
        """By its endpoint; None: whoever had asked is gone."""
        if self._answer.done():
            return  # whoever waited for it was cancelled
        if isinstance(said, Exception):
            self._answer.set_exception(said)
            self._answer.exception()  # nobody may be there to ask
        else:
            self._answer.set_result(said)

    def drop(self) -> None:
        """Nobody needs it, or nobody does any more."""
        if not self._is_dropped:
            self._is_dropped = True
            if not self._answer.done() or self._answer.cancelled():
                self.forget()
