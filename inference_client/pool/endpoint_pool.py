"""The endpoints together: requests go to one that has confirmed their version, retries elsewhere.

Everything here runs on one asyncio loop (the producer's). How requests are sent is the caller's
``fetch``; who goes where is ``dispatch.py``'s, who is up ``fleet.py``'s.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from easyrl.config import InferenceConfig, SamplingConfig
from easyrl.inference_client.errors import (
    AttemptsFailed,
    EndpointError,
    PromptTooLong,
    RequestRejected,
    WrongVersion,
)
from easyrl.inference_client.pool.endpoint import Attempt, Endpoint, IdleTime
from easyrl.inference_client.pool.endpoint_list import EndpointState
from easyrl.inference_client.pool.fleet import Fleet
from easyrl.inference_client.pool.group_assignment import ExpectedLengths, GroupAssignment
from easyrl.schema import Completion

# url, prompt int32 [P], sampling, seed → one response; raises ``EndpointError``
Fetch = Callable[[str, np.ndarray, SamplingConfig, int], Awaitable[Completion]]


def read_api_key(config: InferenceConfig) -> str | None:
    """The endpoints' bearer token, if they want one. Raises ``ValueError`` if it is not set."""
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ValueError(
            f"inference.api_key_env: the environment variable {config.api_key_env} is not set; "
            "export it with the endpoints' key, or remove inference.api_key_env"
        )
    return key


class EndpointPool(Fleet):
    """All inference endpoints; they may come and go.

    Args:
        config: limits and time-outs, and the URLs unless ``urls`` are given.
        fetch: sends one request and decodes the answer; cancelling it aborts the request.
        urls: of the endpoints at the start, without trailing slashes.
        num_shares: processes that share the endpoints (trainer ranks); ``max_inflight`` is divided
            by it.
        update_timeout_s: for each answer to a request that touches weights.
        back_off_s: how long an endpoint is set aside after a first failure; doubles up to 30 s.
        probe_timeout_s: of a health probe; default twice ``health_interval_s``, from 1 to 10 s.
    """

    def __init__(
        self,
        config: InferenceConfig,
        fetch: Fetch,
        *,
        urls: Sequence[str] | None = None,
        num_shares: int = 1,
        update_timeout_s: float = 600.0,
        back_off_s: float = 0.5,
        probe_timeout_s: float | None = None,
    ) -> None:
        super().__init__(
            config,
            config.endpoints if urls is None else urls,
            api_key=read_api_key(config),
            num_shares=num_shares,
            update_timeout_s=update_timeout_s,
            back_off_s=back_off_s,
            probe_timeout_s=probe_timeout_s,
        )
        self.num_retries = 0
        self._fetch = fetch
        self._orders = itertools.count()
        self._idle_time = IdleTime()

    @asynccontextmanager
    async def group(
        self,
        num_prompt_tokens: int,
        sampling: SamplingConfig,
        version: str | None = None,
        *,
        num_samples: int,
        lengths: ExpectedLengths | None = None,
        index: int = 0,
        priority: int = 0,
    ) -> AsyncIterator[GroupAssignment]:
        """The turn of a group: its samples are to be asked for inside, with this place.

        Consumes: room at an endpoint. Waits for: it, shorter groups first
        (``inference.dispatch``). Is unblocked by: an answer, a recovered endpoint, ``confirm``.
        Produces: a place that keeps the samples together. Raises ``NoEndpointError``.

        Args:
            lengths, index: how long responses to this prompt were; what comes is added.
            priority: lower ones go before any others: the update of the batch that trains it.
        """
        expected = sampling.max_tokens / 2 if lengths is None else lengths.of(index)
        first = expected if self._config.dispatch == "shortest_first" else 0.0
        rank = (priority, first, next(self._orders))
        tokens = num_prompt_tokens + int(expected)
        group = GroupAssignment(rank, version, tokens, num_samples, lengths, index)
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

        Consumes: a place at an endpoint that has confirmed the group's version (any, if None).
        Waits for: such a place, and the response. Is unblocked by: an answer, a recovered endpoint,
        ``confirm``. Produces: a completion of which every token is stamped with that version; with
        finish_reason "length" also where the endpoints' context ends before ``max_tokens``.

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
                completion = await self._attempt(endpoint, prompt_token_ids, sampling, seed, group)
            except RequestRejected:
                raise
            except EndpointError as error:
                attempts.append(error)
                if len(attempts) > self._config.max_retries:
                    raise AttemptsFailed(attempts) from error
                self.num_retries += 1
                avoid = endpoint
                continue
            group.saw(len(completion.token_ids))
            return completion

    async def _attempt(
        self,
        endpoint: Endpoint,
        prompt_token_ids: np.ndarray,
        sampling: SamplingConfig,
        seed: int,
        group: GroupAssignment,
    ) -> Completion:
        """Asks ``endpoint``, at which a place is taken, and gives the place back."""
        task = asyncio.current_task()
        assert task is not None
        attempt = Attempt(task)
        endpoint.attempts.add(attempt)
        try:
            completion = await self._fetch(endpoint.url, prompt_token_ids, sampling, seed)
            self._check_stamps(endpoint, completion, group.version)
        except asyncio.CancelledError:
            if attempt.aborted is None or task.uncancel() > 0:
                raise  # somebody else's cancellation
            raise attempt.aborted from None
        except (RequestRejected, WrongVersion):
            raise
        except EndpointError as error:
            self.set_aside(endpoint, error)  # before its place is given to somebody else
            raise
        finally:
            endpoint.attempts.discard(attempt)
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
        """Seconds with nothing in flight since the start, mean over the endpoints."""
        return self._idle_time.mean_s(self.endpoints)
