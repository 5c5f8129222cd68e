"""Orders for single samples, sent to an endpoint together and answered one by one.

Where the endpoint streams samples (``ServedModel.streams_samples``): what a fetcher is told to send
at a time travels as one HTTP request, of which each sample comes back when it has finished. Nothing
else changes for a sample: its seed, its retries elsewhere, its cancelling are its own.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import TypeAlias

import numpy as np

from easyrl.completion_check import Vocabulary, limits_of
from easyrl.config import SamplingConfig
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import EndpointError
from easyrl.inference_client.fetching.messages import Send
from easyrl.inference_client.sample_stream import SamplesAsked
from easyrl.schema import Completion

# of one HTTP request: a connection that breaks costs so many samples an attempt
MOST_SAMPLES = 256
MOST_PROMPT_TOKENS = 2**20  # the server reads a body of 64 MiB
END_S = 2.0  # for an answer to end after all that somebody waits for has come

# told of each order: its response, or the error that ended it, and when it was sent
Answered: TypeAlias = Callable[[Send, Completion | Exception, float], None]


class StreamedRequests:
    """Joins orders of one turn of the loop: same endpoint, same sampling."""

    def __init__(
        self,
        client_of: Callable[[Send], EndpointClient],
        vocabulary: Vocabulary,
        answered: Answered,
    ) -> None:
        self._client_of, self._vocabulary, self._answered = client_of, vocabulary, answered
        self._loop = asyncio.get_running_loop()
        self._joining: list[Send] = []
        self._requests: dict[int, _Request] = {}  # by number of the order

    def add(self, order: Send) -> None:
        if not self._joining:
            self._loop.call_soon(self._send)
        self._joining.append(order)

    def cancel(self, number: int) -> None:
        """Nothing happens if it was answered."""
        self._joining = [order for order in self._joining if order.number != number]
        if (request := self._requests.pop(number, None)) is not None:
            request.cancel(number)

    def _send(self) -> None:
        joining, self._joining = self._joining, []
        alike: dict[tuple[str, bytes, str | None], list[Send]] = {}
        for order in joining:
            alike.setdefault((order.url, order.sampling, order.api_key), []).append(order)
        for orders in alike.values():
            for part in _parts(orders):
                client = self._client_of(part[0])
                request = _Request(client, part, self._vocabulary, self._take)
                self._requests |= dict.fromkeys((order.number for order in part), request)

    def _take(self, order: Send, result: Completion | Exception, start_s: float) -> None:
        if self._requests.pop(order.number, None) is not None:  # else it was cancelled
            self._answered(order, result, start_s)


def _parts(orders: Sequence[Send]) -> Iterator[list[Send]]:
    """What one HTTP request may hold."""
    part: list[Send] = []
    num_tokens = 0
    for order in orders:
        if part and (len(part) == MOST_SAMPLES or num_tokens > MOST_PROMPT_TOKENS):
            yield part
            part, num_tokens = [], 0
        part.append(order)
        num_tokens += len(order.prompt) // np.dtype(np.int32).itemsize
    if part:
        yield part


class _Request:
    """One HTTP request, and the orders that it has still to answer."""

    def __init__(
        self,
        client: EndpointClient,
        orders: Sequence[Send],
        vocabulary: Vocabulary,
        take: Answered,
    ) -> None:
        prompts: dict[bytes, list[Send]] = {}
        for order in orders:
            prompts.setdefault(order.prompt, []).append(order)
        sampling = SamplingConfig.model_validate_json(orders[0].sampling)
        self._asked = SamplesAsked(
            uuid.uuid4().hex,
            [
                (np.frombuffer(prompt, np.int32), [order.seed for order in same])
                for prompt, same in prompts.items()
            ],
            sampling,
        )
        in_order = [order for same in prompts.values() for order in same]
        self._waiting = dict(enumerate(in_order))  # by number of the sample
        self._numbers = {order.number: index for index, order in self._waiting.items()}
        self._cancelled: set[int] = set()  # of those that wait
        self._to_abort: list[str] = []
        self._aborting: asyncio.Task[None] | None = None
        self._end: asyncio.TimerHandle | None = None
        self._client, self._take = client, take
        self._limits = limits_of(sampling, vocabulary, told_length=True)
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with aclosing(self._client.samples(self._asked, self._limits)) as parts:
                async for part in parts:
                    for index, result in part:
                        self._cancelled.discard(index)
                        self._take(self._waiting.pop(index), result, self._start_s)
                    if self._end is None and len(self._cancelled) == len(self._waiting):
                        # nobody else watches it: a server that goes on keeps no connection
                        self._end = self._loop.call_later(END_S, self._task.cancel)
        except Exception as error:
            for order in self._waiting.values():
                self._take(order, error, self._start_s)
        finally:
            if self._end is not None:
                self._end.cancel()

    def cancel(self, number: int) -> None:
        """The server is told to abort it; when nothing else waits, by closing the connection."""
        index = self._numbers[number]
        self._cancelled.add(index)
        if len(self._cancelled) == len(self._waiting):
            self._task.cancel()
            return
        self._to_abort.append(self._asked.id_of(index))
        if self._aborting is None:
            self._aborting = self._loop.create_task(self._abort())

    async def _abort(self) -> None:
        """One message for all that are cancelled together, or while another is on its way."""
        while self._to_abort and not self._task.done() and not self._task.cancelling():
            to_abort, self._to_abort = self._to_abort, []
            with suppress(EndpointError):  # then they are made in vain
                await self._client.abort_samples(to_abort)
        self._aborting = None
