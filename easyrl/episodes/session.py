"""A session: the turns of one episode, each recorded before anybody sees its answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import numpy as np

from easyrl.config import HistoryMode, SamplingConfig
from easyrl.episodes.turns import TurnRecord, recorded
from easyrl.gateway.messages import Lease
from easyrl.gateway.turn_sampling import TurnSeeds, narrowed
from easyrl.inference_client.errors import PromptRejected, PromptTooLong
from easyrl.inference_client.pool.asked_ahead import AskedAhead
from easyrl.schema import Completion, Prompt

TURN_CHARACTERS = 16  # of the session's name in those of its turns
OUT_OF_TURNS = "max_turns_exceeded"  # code and beginning of the refusal beyond max_turns
BAD_REQUEST, GONE, UNAVAILABLE = 400, 410, 503  # HTTP


class Generate(Protocol):
    def __call__(
        self,
        prompt_ids: np.ndarray,
        sampling: SamplingConfig,
        seed: int,
        ahead: AskedAhead | None = None,
    ) -> Awaitable[Completion]:
        """What an endpoint of the session's version samples behind ``prompt_ids``, int32 [P];
        ``ahead``: a request that may stand for its own."""


# told when the place is lent no more → an endpoint that may be asked ahead for the next turn
LendPlace = Callable[[Callable[[], object]], Lease | None]


def lend_none(on_recall: Callable[[], object]) -> Lease | None:
    """A ``LendPlace`` that has nothing to lend."""
    return None


class TurnRefused(Exception):
    """A turn that is not sampled; ``status`` is HTTP's, ``code`` of OpenAI's error object."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class SessionLost(RuntimeError):
    """A process died that an episode needs: it starts again, with the same seeds.

    ``is_suspect``: the episode may be the reason.
    """

    def __init__(self, message: str, *, is_suspect: bool = True) -> None:
        super().__init__(message)
        self.is_suspect = is_suspect


@dataclass(eq=False)
class Session:
    """One attempt at one sample of a group: a version of the policy, and what it was asked.

    Every method belongs to the producer's loop.
    """

    prompt: Prompt
    sampling: SamplingConfig  # of every turn; an environment may shorten one, no more
    seed: int  # of the sample
    generate: Generate
    _: KW_ONLY
    applies_stop_strings: bool = True  # all endpoints do
    max_turns: int = 1000
    history: HistoryMode = "keep"  # of its chats
    # told of each turn before its answer goes out; what it raises is the run's
    on_turn: Callable[[Sequence[TurnRecord]], object] = lambda records: None
    lend_place: LendPlace = lend_none
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    key: str = field(default_factory=lambda: secrets.token_hex(16))  # of HTTP
    records: list[TurnRecord] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked_s = time.monotonic()
        self._seeds = TurnSeeds(self.seed)
        self._running: set[asyncio.Task[TurnRecord]] = set()
        self._sampling_since_s = 0.0
        self.sampled_s: list[tuple[float, float]] = []  # when something was, time.monotonic()
        self._num_turns = 0
        self.is_out_of_turns = False  # one beyond max_turns was asked for, and refused
        self._is_open = True

    @property
    def idle_s(self) -> float:
        """Seconds in which nothing was asked; 0 while something is sampled."""
        return 0.0 if self._running else time.monotonic() - self._asked_s

    def fail(self, error: Exception) -> None:
        """The episode cannot go on, whatever its environment does."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # nobody may be there to ask

    async def turn(
        self,
        prompt_ids: np.ndarray,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        stop_token_ids: tuple[int, ...] = (),
    ) -> TurnRecord:
        """What the policy samples behind ``prompt_ids``, int32 [P]; recorded when this returns.

        A turn that was begun is sampled to its end and recorded, also if its client is gone and
        this is cancelled. Raises ``TurnRefused``.
        """
        turn = self.begin_turn(prompt_ids, max_tokens, stop, stop_token_ids)
        return await asyncio.shield(turn)

    def begin_turn(
        self,
        prompt_ids: np.ndarray,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        stop_token_ids: tuple[int, ...] = (),
        ahead: AskedAhead | None = None,
    ) -> asyncio.Task[TurnRecord]:
        """As ``turn``, without waiting: a task that nobody may cancel. ``ahead``: has been sent for
        it."""
        sampling = self._sampling(max_tokens, stop, stop_token_ids)
        if not len(prompt_ids):
            raise TurnRefused(BAD_REQUEST, "the prompt has no tokens")
        if not self._is_open:
            raise TurnRefused(GONE, "the episode has ended")
        if self._num_turns >= self.max_turns:
            self.is_out_of_turns = True
            raise TurnRefused(
                BAD_REQUEST,
                # some clients keep an error's text alone
                f"{OUT_OF_TURNS}: an episode has at most {self.max_turns} turns (max_turns of its "
                "environment)",
                OUT_OF_TURNS,
            )
        self._num_turns += 1
        if not self._running:
            self._sampling_since_s = time.monotonic()
        task = asyncio.create_task(self._sample(prompt_ids, sampling, ahead))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """No further turn; returns when those that were begun are recorded."""
        self._is_open = False
        while self._running:
            await asyncio.wait(list(self._running))

    def lease(self, on_recall: Callable[[], object]) -> Lease | None:
        """An endpoint that may be asked ahead for the next turn; None: none, or there is no turn.

        ``on_recall``: it may not any more.
        """
        if not self._is_open or self._num_turns >= self.max_turns:
            return None
        return self.lend_place(on_recall)

    async def _sample(
        self, prompt_ids: np.ndarray, sampling: SamplingConfig, ahead: AskedAhead | None
    ) -> TurnRecord:
        seed = self._seeds.next(prompt_ids)
        try:
            completion = await self.generate(prompt_ids, sampling, seed, ahead)
            # nothing is awaited between the two: their order is the records'
            name = f"turn-{self.id[:TURN_CHARACTERS]}-{len(self.records)}"
            record = recorded(prompt_ids, completion, self.records, name)
            self.records.append(record)
            self.on_turn(self.records)
        except PromptTooLong as error:
            raise TurnRefused(BAD_REQUEST, error.reason, "context_length_exceeded") from None
        except PromptRejected as error:
            raise TurnRefused(BAD_REQUEST, error.reason) from None
        except Exception as error:  # the run's: the sample raises it
            self.fail(error)
            raise TurnRefused(UNAVAILABLE, f"the run is interrupted: {error}") from error
        return record

    def _ended(self, task: asyncio.Task[TurnRecord]) -> None:
        self._running.discard(task)
        self._asked_s = time.monotonic()
        if not self._running:
            self.sampled_s.append((self._sampling_since_s, self._asked_s))
        if not task.cancelled():
            task.exception()  # told to the client, if there is one

    def _sampling(
        self, max_tokens: int | None, stop: tuple[str, ...], stop_token_ids: tuple[int, ...]
    ) -> SamplingConfig:
        own = self.sampling
        if stop and not (own.stop or self.applies_stop_strings):
            raise TurnRefused(
                BAD_REQUEST,
                "stop: an endpoint of the run cannot apply stop strings; use stop_token_ids, or "
                "servers with a tokenizer in their model's folder",
            )
        if max_tokens is not None and max_tokens < 1:
            raise TurnRefused(BAD_REQUEST, f"max_tokens is {max_tokens}, at least 1")
        return narrowed(own, max_tokens, stop, stop_token_ids)
