"""Requests that the gateway sends to an endpoint itself, where its session was lent a place.

Consumes: turns of sessions with a lease. Waits for: the endpoint's response. Is unblocked by: that,
or the trainer's word that nobody needs it. Produces: the response, for the trainer's process, which
was told of the request and takes it for its own where it would have asked the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import aiohttp
import numpy as np

from easyrl.completion_check import Vocabulary
from easyrl.gateway.messages import Ahead, Came, Failed
from easyrl.gateway.requests import Limits
from easyrl.gateway.sessions import Session
from easyrl.gateway.turn_sampling import narrowed
from easyrl.inference_client.adapter_names import AdapterNames
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.errors import EndpointError, EndpointUnavailable
from easyrl.inference_client.fetching.fetcher_process import NO_MEMORY, local_fetch
from easyrl.inference_client.fetching.messages import Fetched, Send
from easyrl.inference_client.fetching.single_requests import SingleRequests
from easyrl.schema import Completion


class LeasedRequests:
    """Those that have been sent, by the number of their ``Ask``, until that is answered.

    Args:
        http: asks the endpoints.
        vocabulary: of the policy; a response with another token is its endpoint's fault.
        send: tells the trainer's process.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        vocabulary: Vocabulary,
        send: Callable[[Came], object],
    ) -> None:
        self._send = send
        self._asking: dict[int, Session] = {}
        self._responses: dict[int, Completion] = {}
        keys, names = ApiKeys(), AdapterNames()
        fetch = local_fetch(http, vocabulary, keys, adapters=names)
        self._requests = SingleRequests(fetch, keys, names, self._answered)

    def begin(
        self, number: int, session: Session, prompt_ids: np.ndarray, limits: Limits
    ) -> Ahead | None:
        """Asks the endpoint at which ``session`` was lent a place; None: the trainer's process has
        to ask.

        That looks at stop strings, at prompts without tokens, at those for which the context is too
        short, and at turns beyond the last.
        """
        seed = session.seeds.next(prompt_ids)
        session.num_asked += 1
        lease = session.lease
        if lease is None or session.is_asking or session.num_asked > session.max_turns:
            return None
        sampling = narrowed(session.sampling, limits.max_tokens, (), limits.stop_token_ids)
        num_tokens = len(prompt_ids) + sampling.max_tokens
        if limits.stop or not len(prompt_ids) or num_tokens > lease.context:
            return None
        encoded = session.encoded_sampling
        if sampling is not session.sampling:
            encoded = sampling.model_dump_json().encode()
        session.is_asking = True
        self._asking[number] = session
        prompt = prompt_ids.tobytes()
        self._requests.add(
            Send(number, lease.url, prompt, encoded, seed, lease.api_key, model=lease.model)
        )
        return Ahead(lease.url, seed, sampling.max_tokens, time.monotonic())

    def drop(self, number: int) -> None:
        """Nobody needs the response."""
        if (session := self._asking.pop(number, None)) is not None:
            session.is_asking = False
            self._requests.cancel(number)

    def take(self, number: int) -> Completion | None:
        """The response, if it came; the ``Ask`` is over."""
        return self._responses.pop(number, None)

    def _answered(
        self, orders: Sequence[Send], result: Completion | Exception, start_s: float
    ) -> None:
        (order,) = orders
        if (session := self._asking.pop(order.number, None)) is None:
            return  # dropped as it came
        session.is_asking = False
        if isinstance(result, Completion):
            self._responses[order.number] = result
            self._send(Came(Fetched.of(order.number, result)))
        else:
            self._send(Came(_failed(order.number, result)))


def _failed(number: int, error: Exception) -> Failed:
    if isinstance(error, MemoryError):
        return Failed(number, EndpointUnavailable.__name__, NO_MEMORY)
    reason = error.reason if isinstance(error, EndpointError) else str(error)
    return Failed(number, type(error).__name__, reason)
