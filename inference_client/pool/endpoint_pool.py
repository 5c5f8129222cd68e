"""The endpoints together: requests go to one that has confirmed their version, retries elsewhere.

Who goes where is ``dispatch.py``'s, who is up ``fleet.py``'s.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from easyrl.config import InferenceConfig, SamplingConfig
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.client import Fetch
from easyrl.inference_client.errors import (
    AttemptsFailed,
    EndpointError,
    PromptTooLong,
    RequestRejected,
    WrongVersion,
)
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.endpoint_list import EndpointState
from easyrl.inference_client.pool.fleet import Fleet
from easyrl.inference_client.pool.group_assignment import GroupAssignment
from easyrl.schema import Completion


class EndpointPool(Fleet):
    """All inference endpoints; they may come and go.

    Args:
        fetch: sends one request and decodes the answer; cancelling it aborts the request.
        urls: of the endpoints at the start, without trailing slashes; default: the configuration's.
        api_keys: their bearer tokens; default: those that the configuration names.
        num_shares: processes that share the endpoints (trainer ranks); ``max_inflight`` is divided
            by it.
        update_timeout_s: for each answer to a request that touches weights.
    """

    def __init__(
        self,
        config: InferenceConfig,
        fetch: Fetch,
        *,
        urls: Sequence[str] | None = None,
        api_keys: ApiKeys | None = None,
        num_shares: int = 1,
        update_timeout_s: float = 600.0,
    ) -> None:
        urls = config.urls if urls is None else urls
        api_keys = api_keys or ApiKeys.read(config)
        super().__init__(config, urls, api_keys, num_shares, update_timeout_s)
        self.num_retries = 0
        self._fetch = fetch
        self._orders = itertools.count()
        self._idle_s = 0.0

    @asynccontextmanager
    async def group(
        self,
        num_prompt_tokens: int,
        expected_tokens: float,
        version: str | None = None,
        *,
        num_samples: int,
        priority: int = 0,
    ) -> AsyncIterator[GroupAssignment]:
        """The turn of a group: its samples are to be asked for inside, with this place.

        Waits for room at an endpoint, lower ``priority`` first (the update of the batch that trains
        it), then shorter groups (``inference.dispatch``). Raises ``NoEndpointError``.
        """
        first = expected_tokens if self._config.dispatch == "shortest_first" else 0.0
        rank = (priority, first, next(self._orders))
        tokens = num_prompt_tokens + int(expected_tokens)
        group = GroupAssignment(rank, version, tokens, num_samples)
        await self._dispatcher.turn(group)
        try:
            yield group
        finally:
            self._dispatcher.leave(group)

    async def generate(
        self,
        prompt_token_ids: np.ndarray,
        sampling: SamplingConfig,
        seed: int,
        group: GroupAssignment,
    ) -> Completion:
        """One response to the prompt, int32 [P], as a sample of ``group``.

        Every token is stamped with the group's version (unless that is None). The finish_reason is
        "length" also where the endpoints' context ends before ``max_tokens``.

        What fails is sent to another endpoint, with the same seed, ``max_retries`` times. Raises
        ``AttemptsFailed``, ``Outage``, ``NoEndpointError``, ``PromptRejected`` if this prompt is
        refused, else ``RequestRejected``. Cancelling aborts the request on the server.
        """
        sampling = self._fitting(prompt_token_ids, sampling)
        attempts: list[EndpointError] = []
        avoid: Endpoint | None = None
        while True:
            endpoint = await self._dispatcher.place(group, avoid)
            try:
                fetch = partial(self._fetch, endpoint.url, prompt_token_ids, sampling, seed)
                return await self._attempt(endpoint, group, fetch)
            except RequestRejected:
                raise
            except EndpointError as error:
                attempts.append(error)
                if len(attempts) > self._config.max_retries:
                    raise AttemptsFailed(attempts) from error
                self.num_retries += 1
                avoid = endpoint

    async def _attempt(
        self, endpoint: Endpoint, group: GroupAssignment, fetch: Callable[[], Awaitable[Completion]]
    ) -> Completion:
        """Waits for ``endpoint``, at which a place is taken, and gives the place back."""
        task = asyncio.current_task()
        assert task is not None
        endpoint.attempts[task] = None
        try:
            completion = await fetch()
            self._check_stamps(endpoint, completion, group.version)
        except asyncio.CancelledError:
            aborted = endpoint.attempts[task]
            if aborted is None or task.uncancel() > 0:
                raise  # somebody else's cancellation
            raise aborted from None
        except (RequestRejected, WrongVersion):
            raise
        except EndpointError as error:
            self.set_aside(endpoint, error)  # before its place is given to somebody else
            raise
        finally:
            del endpoint.attempts[task]
            self._dispatcher.release(endpoint, group.sample_tokens)
            self._forget_if_done(endpoint)
        endpoint.answered()
        # the number of now: a proof that is yet to come judges all since the last good one
        return replace(completion, proof=endpoint.proof)

    def _check_stamps(
        self, endpoint: Endpoint, completion: Completion, version: str | None
    ) -> None:
        if version is None or all(s.version == version for s in completion.version_spans):
            return
        stamped = sorted({span.version for span in completion.version_spans})
        wrong = WrongVersion(endpoint.url, f"tokens of {stamped}, asked for {version}")
        endpoint.num_failures += 1
        self._lose_confirmation(endpoint, version, wrong.reason)
        raise wrong

    def _fitting(self, prompt_token_ids: np.ndarray, sampling: SamplingConfig) -> SamplingConfig:
        """Asks for what the endpoints' context has room for. Raises ``PromptTooLong``."""
        context_len = self._context_len
        if context_len is None:
            return sampling
        room = context_len - len(prompt_token_ids)
        if sampling.max_tokens <= room:
            return sampling
        if room < max(1, sampling.min_tokens):
            raise PromptTooLong(
                "inference.endpoints",
                f"a prompt of {len(prompt_token_ids)} tokens leaves no room for a response in a "
                f"context of {context_len} tokens; raise the servers' --max-model-len, or "
                "lower data.max_prompt_tokens",
            )
        return sampling.model_copy(update={"max_tokens": room})

    def states(self) -> list[EndpointState]:
        """Each endpoint as ``easyrl endpoints list`` shows it."""
        return [
            EndpointState(
                url=endpoint.url,
                state=endpoint.status(self._current_version),
                confirmed_version=endpoint.confirmed_version,
                in_flight=endpoint.num_inflight,
                failures=endpoint.num_failures,
                served=endpoint.num_completed,
            )
            for endpoint in self.endpoints
        ]

    def idle_s(self) -> float:
        """Seconds with nothing in flight since the start, mean over the endpoints there were."""
        if endpoints := self.endpoints:
            self._idle_s += sum(e.take_idle_s() for e in endpoints) / len(endpoints)
        return self._idle_s
