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

import numpy as np

from easyrl.completion_check import Vocabulary, limits_of
from easyrl.config import SamplingConfig
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import EndpointError, JointRequestRejected
from easyrl.inference_client.fetching.messages import Send
from easyrl.inference_client.fetching.single_requests import Answered
from easyrl.inference_client.sample_stream import SamplesAsked
from easyrl.schema import Completion

# of one HTTP request: a connection that breaks costs so many samples an attempt
MOST_SAMPLES = 256
MOST_PROMPT_TOKENS = 2**20  # the server reads a body of 64 MiB
END_S = 2.0  # for an answer to end after all of its samples have come


class StreamedRequests:
    """Joins orders of one turn of the loop: same endpoint, same sampling.

    What is refused together, for a body that is too large, say, is asked for in halves, at last by
    ``send_singly``: a refusal of many says nothing of one prompt.
    """

    def __init__(
        self,
        client_of: Callable[[Send], EndpointClient],
        vocabulary: Vocabulary,
        answered: Answered,
        send_singly: Callable[[Send], None],
    ) -> None:
        self._client_of, self._vocabulary = client_of, vocabulary
        self._answered, self._send_singly = answered, send_singly
        self._loop = asyncio.get_running_loop()
        self._joining: dict[int, Send] = {}  # by number of the order
        self._requests: dict[int, _JointRequest] = {}

    @property
    def in_flight(self) -> bool:
        """Samples that are asked for, or about to be."""
        return bool(self._joining or self._requests)

    def add(self, order: Send) -> None:
        if not self._joining:
            self._loop.call_soon(self._send)
        self._joining[order.number] = order

    def cancel(self, number: int) -> None:
        """Nothing happens if it was answered."""
        self._joining.pop(number, None)
        if (request := self._requests.pop(number, None)) is not None:
            request.cancel(number)

    def _send(self) -> None:
        joining, self._joining = self._joining, {}
        alike: dict[tuple[str, bytes, str | None], list[Send]] = {}
        for order in joining.values():
            alike.setdefault((order.url, order.sampling, order.api_key), []).append(order)
        for orders in alike.values():
            for part in _parts(orders):
                self._ask(part)

    def _ask(self, orders: Sequence[Send]) -> None:
        client = self._client_of(orders[0])
        request = _JointRequest(client, orders, self._vocabulary, self._take, self._ask_in_parts)
        self._requests |= dict.fromkeys((order.number for order in orders), request)

    def _ask_in_parts(self, orders: Sequence[Send]) -> None:
        """Orders that were refused together."""
        middle = len(orders) // 2
        for part in (orders[:middle], orders[middle:]):
            if len(part) > 1:
                self._ask(part)
            elif part:
                del self._requests[part[0].number]
                self._send_singly(part[0])

    def _take(self, orders: Sequence[Send], result: Completion | Exception, start_s: float) -> None:
        """Those of ``orders`` that were not cancelled are answered."""
        waiting = [order for order in orders if self._requests.pop(order.number, None) is not None]
        if waiting:
            self._answered(waiting, result, start_s)


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


class _JointRequest:
    """One HTTP request, and the orders that it has still to answer.

    ``refused`` is told of those that nobody has cancelled when the server refused them together.
    """

    def __init__(
        self,
        client: EndpointClient,
        orders: Sequence[Send],
        vocabulary: Vocabulary,
        take: Answered,
        refused: Callable[[Sequence[Send]], None],
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
        self._has_begun = False  # the server has all of it, and can abort what is in it
        self._to_abort: list[str] = []
        self._aborting: asyncio.Task[None] | None = None
        self._client, self._take, self._refused = client, take, refused
        self._limits = limits_of(sampling, vocabulary, told_length=True)
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        end: asyncio.TimerHandle | None = None
        try:
            async with aclosing(self._client.samples(self._asked, self._limits)) as parts:
                async for part in parts:
                    self._has_begun = True
                    self._abort_soon()
                    for index, result in part:
                        self._cancelled.discard(index)
                        self._take([self._waiting.pop(index)], result, self._start_s)
                    if not self._waiting:  # a server that goes on keeps no connection
                        end = end or self._loop.call_later(END_S, self._task.cancel)
                    elif len(self._cancelled) == len(self._waiting):
                        return  # closes the connection: whether or not they were aborted
        except JointRequestRejected:
            self._refused([o for i, o in self._waiting.items() if i not in self._cancelled])
        except Exception as error:
            self._take(list(self._waiting.values()), error, self._start_s)
        finally:
            if end is not None:
                end.cancel()

    def cancel(self, number: int) -> None:
        """The server is told to abort it; when nothing else waits, by closing the connection."""
        index = self._numbers[number]
        self._cancelled.add(index)
        if len(self._cancelled) == len(self._waiting):
            self._task.cancel()
            return
        self._to_abort.append(self._asked.id_of(index))
        self._abort_soon()

    def _abort_soon(self) -> None:
        """Not before the server has the request: one that overtook it would be lost."""
        if self._has_begun and self._to_abort and self._aborting is None:
            self._aborting = self._loop.create_task(self._abort())

    async def _abort(self) -> None:
        """One message for all that are cancelled together, or while another is on its way."""
        while self._to_abort and not self._task.done() and not self._task.cancelling():
            to_abort, self._to_abort = self._to_abort, []
            with suppress(EndpointError):  # then they are made in vain
                await self._client.abort_samples(to_abort)
        self._aborting = None
