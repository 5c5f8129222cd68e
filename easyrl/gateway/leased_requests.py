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
from easyrl.gateway.messages import Ahead, Came
from easyrl.gateway.requests import Limits
from easyrl.gateway.sessions import Session
from easyrl.gateway.turn_sampling import narrowed
from easyrl.inference_client.adapter_names import AdapterNames
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.fetching.fetcher_process import local_fetch, replies_to
from easyrl.inference_client.fetching.messages import Send
from easyrl.inference_client.fetching.single_requests import SingleRequests
from easyrl.schema import Completion


class LeasedRequests:
    """Those under way, by the number of their ``Ask``."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        vocabulary: Vocabulary,
        send: Callable[[Came], object],
    ) -> None:
        self._send = send
        keys, names = ApiKeys(), AdapterNames()
        fetch = local_fetch(http, vocabulary, keys, adapters=names)
        self._requests = SingleRequests(fetch, keys, names, self._answered)

    def begin(
        self, number: int, session: Session, prompt_ids: np.ndarray, limits: Limits
    ) -> Ahead | None:
        """Asks the endpoint that ``session`` was lent, once; None: the trainer's process has to.

        That looks at stop strings, at prompts without tokens, and at those for which a context is
        too short.
        """
        seed = session.seeds.next(prompt_ids)
        lease = session.lease
        if lease is None or limits.stop or not len(prompt_ids):
            return None
        sampling = narrowed(session.sampling, limits.max_tokens, (), limits.stop_token_ids)
        if len(prompt_ids) + sampling.max_tokens > lease.context:
            return None
        session.lease = None
        encoded = session.encoded_sampling
        if sampling is not session.sampling:
            encoded = sampling.model_dump_json().encode()
        prompt = prompt_ids.tobytes()
        self._requests.add(
            Send(number, lease.url, prompt, encoded, seed, lease.api_key, model=lease.model)
        )
        return Ahead(lease.url, seed, sampling.max_tokens, time.monotonic())

    def drop(self, number: int) -> None:
        """Nobody needs the response."""
        self._requests.cancel(number)

    def _answered(
        self, orders: Sequence[Send], result: Completion | Exception, start_s: float
    ) -> None:
        for reply in replies_to(orders, result):
            self._send(Came(reply))
