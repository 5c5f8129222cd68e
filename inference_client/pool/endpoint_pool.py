"""The endpoints together: requests go to one that has confirmed their version, retries elsewhere.

Who goes where is ``dispatch.py``'s, who is up ``fleet.py``'s.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from easyrl.config import InferenceConfig, SamplingConfig
from easyrl.inference_client.adapter_names import AdapterNames
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.client import Fetch
from easyrl.inference_client.errors import (
    AttemptsFailed,
    EndpointError,
    EndpointUnavailable,
    NoSuchModel,
    PromptRejected,
    PromptTooLong,
    RequestRejected,
    StreamsRefused,
    WrongVersion,
)
from easyrl.inference_client.pool.asked_ahead import AskedAhead
from easyrl.inference_client.pool.decode_speed import TimedResponse
from easyrl.inference_client.pool.dispatch import NeedChanged
from easyrl.inference_client.pool.endpoint import Endpoint, Need
from easyrl.inference_client.pool.endpoint_list import EndpointState
from easyrl.inference_client.pool.fleet import Fleet
from easyrl.inference_client.pool.group_assignment import GroupAssignment, Rank
from easyrl.schema import Completion, other_run
from easyrl.timeline.spans import FAILED, AddSpan, ignore_span

log = logging.getLogger(__name__)

NUM_REFUSALS = 2  # of endpoints that serve the canary prompt: it stands
MAX_FALSE_REFUSALS = 3  # of prompts that another endpoint served, with the same weights


class Refusal(NamedTuple):
    """A prompt was refused by an endpoint that served the canary prompt then."""

    endpoint: Endpoint
    error: PromptRejected
    num_failures: int  # the endpoint's, when it refused


class EndpointPool(Fleet):
    """All inference endpoints; they may come and go.

    Args:
        fetch: sends one request and decodes the answer; cancelling it aborts the request.
        streamed: the same for endpoints that stream samples; default: ``fetch``.
        urls: of the endpoints at the start, without trailing slashes; default: the configuration's.
        api_keys: their bearer tokens; default: those that the configuration names.
        num_shares: processes that share the endpoints (trainer ranks); ``max_inflight`` is divided
            by it.
        update_timeout_s: for each answer to a request that touches weights.
        adapters: the names that ``fetch`` gives in its requests.
    """

    def __init__(
        self,
        config: InferenceConfig,
        fetch: Fetch,
        *,
        streamed: Fetch | None = None,
        urls: Sequence[str] | None = None,
        api_keys: ApiKeys | None = None,
        num_shares: int = 1,
        update_timeout_s: float = 600.0,
        adapters: AdapterNames | None = None,
    ) -> None:
        urls = config.urls if urls is None else urls
        api_keys = api_keys or ApiKeys.read(config)
        super().__init__(config, fetch, urls, api_keys, num_shares, update_timeout_s)
        self.num_retries = 0
        self.adapters = adapters or AdapterNames()
        self.span: AddSpan = ignore_span  # told of each endpoint, by URL, what it does
        self._fetch, self._streamed = fetch, streamed or fetch
        self._orders = itertools.count()
        self._idle_s = 0.0

    def rank(self, priority: int, expected_tokens: float) -> Rank:
        """The place of a group that asks now: before those that ask later, unless one of them has a
        lower ``priority`` or is shorter."""
        first = expected_tokens if self._config.dispatch == "shortest_first" else 0.0
        return priority, first, next(self._orders)

    @asynccontextmanager
    async def group(
        self,
        num_prompt_tokens: int,
        expected_tokens: float,
        version: str | None = None,
        *,
        num_samples: int,
        priority: int = 0,
        sampling: SamplingConfig | None = None,
        is_of_batch: bool = True,
        rank: Rank | None = None,
    ) -> AsyncIterator[GroupAssignment]:
        """The turn of a group: its samples are to be asked for inside, with this place.

        Waits for room at an endpoint, lower ``priority`` first (the update of the batch that trains
        it), then shorter groups (``inference.dispatch``); with ``sampling`` at one whose context
        has room for the samples. With ``is_of_batch`` the batch's limits of requests in flight hold
        from now on. ``rank``: its place among the others, of one that has waited elsewhere since.
        Raises ``NoEndpointError``, ``PromptTooLong``.
        """
        if is_of_batch:
            self.limits.hold()
        rank = rank or self.rank(priority, expected_tokens)
        tokens = num_prompt_tokens + int(expected_tokens)
        group = GroupAssignment(rank, version, tokens, num_samples, is_of_batch)
        while True:
            if sampling is not None:
                self._fit(group, num_prompt_tokens, sampling)
            try:
                await self._dispatcher.turn(group)
                break
            except NeedChanged:
                continue
        try:
            yield group
        finally:
            self._dispatcher.leave(group)

    def give_back(self, group: GroupAssignment) -> None:
        """A sample of ``group`` comes later, or not at all: its place is anybody's."""
        self._dispatcher.give_back(group)

    def lend(self, group: GroupAssignment, on_recall: Callable[[], object]) -> Endpoint | None:
        """The endpoint that may be asked for the next of ``group``, a session, before ``generate``
        is called (``AskedAhead``); None if it would have to wait for a place. See ``Dispatcher``.
        """
        return self._dispatcher.lend(group, on_recall)

    def leave(self, group: GroupAssignment) -> None:
        """``group``, a session, asks no more."""
        self._dispatcher.leave(group)

    async def generate(
        self,
        prompt_token_ids: np.ndarray,
        sampling: SamplingConfig,
        seed: int,
        group: GroupAssignment,
        ahead: AskedAhead | None = None,
    ) -> Completion:
        """One response to the prompt, int32 [P], as a sample of ``group``.

        Every token is stamped with the group's version (unless that is None), and its endpoint has
        been cleared (``Fleet.confirm``). The finish_reason is
        "length" also where the endpoints' context ends before ``max_tokens``.

        What fails is sent to another endpoint, with the same seed, ``max_retries`` times, and not
        as a part of a stream again: no other sample's damage costs it a second attempt. So is a
        prompt that one refuses: it is refused if another does too, and both serve the canary
        prompt. It waits for that other; the same one is asked again only where no other is in use,
        none was usable for ``max_outage_s``, or no other's context has room. Raises
        ``AttemptsFailed``, ``Outage``, ``NoEndpointError``, ``PromptRejected`` if this prompt is
        refused, ``PromptTooLong`` if no context has room for it. Cancelling aborts the request on
        the server.

        ``ahead``: has been sent already; it is the first attempt if that would ask the same, now.
        """
        attempts: list[EndpointError] = []
        refusals: list[Refusal] = []
        avoid: Endpoint | None = None
        num_prompt_tokens = len(prompt_token_ids)
        on_wait = (lambda: None) if ahead is None else ahead.drop
        while True:
            refused_by = refusals[0].endpoint if refusals else None
            fitting = self._fit(group, num_prompt_tokens, sampling, refused_by)
            try:
                endpoint = await self._dispatcher.place(group, avoid, on_wait)
            except NeedChanged:
                continue
            if 0 < endpoint.context < num_prompt_tokens + fitting.max_tokens:  # joined meanwhile
                self._dispatcher.release(endpoint, group.sample_tokens)
                continue
            may_stream = not (attempts or refusals)
            try:
                completion = await self._attempt(
                    endpoint,
                    group,
                    prompt_token_ids,
                    fitting,
                    seed,
                    may_stream=may_stream,
                    ahead=None if attempts or refusals else ahead,
                )
            except PromptRejected as error:
                refusals.append(Refusal(endpoint, error, endpoint.num_failures))
                if len(refusals) == NUM_REFUSALS:
                    raise _refused(refusals) from None
            except EndpointError as error:
                attempts.append(error)
                if len(attempts) > self._config.max_retries:
                    if refusals:  # by one that serves others: nobody else's faults end the run
                        raise _refused(refusals, error) from error
                    raise AttemptsFailed(attempts) from error
            else:
                for refusal in refusals:
                    self._blame(refusal, endpoint)
                return completion
            self.num_retries += 1
            avoid = endpoint

    async def _attempt(
        self,
        endpoint: Endpoint,
        group: GroupAssignment,
        prompt_token_ids: np.ndarray,
        sampling: SamplingConfig,
        seed: int,
        *,
        may_stream: bool,
        ahead: AskedAhead | None,
    ) -> Completion:
        """The response of ``endpoint``, at which a place is taken, once it has been cleared.

        ``PromptRejected``: it serves the canary prompt and refuses this one.
        """
        task = asyncio.current_task()
        assert task is not None
        endpoint.attempts[task] = None
        endpoint.asked(sampling.max_tokens)
        if ahead is not None:
            is_same = ahead.is_for(endpoint.url, sampling, seed)
            if not is_same or ahead.began_s < endpoint.confirmed_s:
                ahead.drop()
                ahead = None
        began_s = time.monotonic() if ahead is None else ahead.began_s
        try:
            answer = await self._answer(
                endpoint,
                group,
                prompt_token_ids,
                sampling,
                seed,
                may_stream=may_stream,
                ahead=ahead,
            )
            ended_s = time.monotonic()
            await endpoint.cleared.wait()  # a quarantine ends it as it ends what is in flight
        except asyncio.CancelledError:
            aborted = endpoint.attempts[task]
            if aborted is None or task.uncancel() > 0:
                raise  # somebody else's cancellation
            self._failed(endpoint, began_s, aborted)
            raise aborted from None
        except EndpointError as error:
            self._failed(endpoint, began_s, error)
            raise
        finally:
            del endpoint.attempts[task]
        if isinstance(answer, PromptRejected):
            self._failed(endpoint, began_s, answer)
            raise answer
        response = TimedResponse(began_s, ended_s, len(answer.token_ids))
        self.span(
            endpoint.url,
            "request" if group.is_of_batch else "evaluation",
            began_s,
            ended_s,
            prompt_tokens=len(prompt_token_ids),
            response_tokens=response.num_tokens,
        )
        endpoint.answered(response.num_tokens, ended_s - began_s)
        self.limits.answered(endpoint, group, response)
        # the number of now: a proof that is yet to come judges all since the last good one
        return replace(answer, proof=endpoint.proof)

    def _failed(self, endpoint: Endpoint, began_s: float, error: Exception) -> None:
        """Tells of a request that has no answer to train on."""
        problem = type(error).__name__
        self.span(endpoint.url, FAILED, began_s, time.monotonic(), problem=problem)

    async def _answer(
        self,
        endpoint: Endpoint,
        group: GroupAssignment,
        prompt_token_ids: np.ndarray,
        sampling: SamplingConfig,
        seed: int,
        *,
        may_stream: bool,
        ahead: AskedAhead | None,
    ) -> Completion | PromptRejected:
        """The response, or the refusal, as it comes; the place is given back then.

        So one that has yet to be cleared is kept busy, and not taken for one that hangs.
        """
        try:
            try:
                completion = None if ahead is None else await ahead.answer()
                if completion is None:
                    completion = await self.ask(
                        endpoint, prompt_token_ids, sampling, seed, may_stream=may_stream
                    )
            except RequestRejected as error:  # its place is held: nothing new is sent meanwhile
                if isinstance(error, NoSuchModel):
                    self._refuse_restarted(endpoint, error, group.version)
                problem = await self._look_into(endpoint, error, sampling)
                if isinstance(problem, PromptRejected):
                    return problem
                raise problem from None
            self._check_stamps(endpoint, completion, group.version)
            endpoint.progressed()
            return completion
        except WrongVersion:
            raise
        except EndpointError as error:
            self.set_aside(endpoint, error)  # before its place is given to somebody else
            raise
        finally:
            self._dispatcher.release(endpoint, group.sample_tokens)
            self._forget_if_done(endpoint)

    async def ask(
        self,
        endpoint: Endpoint,
        prompt_token_ids: np.ndarray,
        sampling: SamplingConfig,
        seed: int,
        *,
        may_stream: bool = True,
    ) -> Completion:
        """One response of ``endpoint``, whatever it serves; raises ``EndpointError``.

        Sent alone, if it may not be part of a stream or there are none after all.

        An endpoint that has refused to stream, whatever the samples were, is not asked again.
        """
        if may_stream and endpoint.streams_samples:
            try:
                return await self._streamed(endpoint.url, prompt_token_ids, sampling, seed)
            except PromptRejected:
                raise
            except RequestRejected as error:
                if not endpoint.refuses_streams:
                    log.warning("%s; its samples are asked for one by one from now on", error)
                endpoint.refuses_streams = True
                if not isinstance(error, StreamsRefused):
                    raise
        return await self._fetch(endpoint.url, prompt_token_ids, sampling, seed)

    async def _look_into(
        self, endpoint: Endpoint, error: RequestRejected, sampling: SamplingConfig
    ) -> EndpointError:
        """``error`` if ``endpoint`` refuses this prompt only, else what is wrong with it."""
        if isinstance(error, PromptRejected):
            problem = await self.canary.problem(endpoint, sampling)
            if problem is None:
                return error
            if isinstance(problem, NoSuchModel):  # restarted meanwhile, and is given it again
                lost = f"has lost its adapter: {problem.reason}"
                return EndpointUnavailable(endpoint.url, lost)
            if not isinstance(problem, RequestRejected):
                return problem
            reason = f"refuses the canary prompt as others: {problem.reason}"
        else:  # a wrong key, a missing route: no prompt's fault
            reason = error.reason
        endpoint.owes_canary = sampling
        return EndpointUnavailable(endpoint.url, reason)

    def _blame(self, refusal: Refusal, server: Endpoint) -> None:
        """``server`` has served what ``refusal`` refused: that was the endpoint's fault.

        Once for all that it refused before it was set aside. Again and again, it is excluded, if
        that leaves another.
        """
        endpoint = refusal.endpoint
        if endpoint.num_failures != refusal.num_failures:
            return
        by = "it served itself" if server is endpoint else "another endpoint served"
        reason = f"refused a prompt that {by}: {refusal.error.reason}"
        self.set_aside(endpoint, EndpointUnavailable(endpoint.url, reason))
        if server is endpoint or not server.is_up:
            return
        endpoint.num_false_refusals += 1
        if endpoint.num_false_refusals == MAX_FALSE_REFUSALS:
            number = f"refused {MAX_FALSE_REFUSALS} prompts that other endpoints served"
            self.exclude(endpoint, f"{number}, the last: {refusal.error.reason}")

    def _refuse_restarted(
        self, endpoint: Endpoint, error: NoSuchModel, version: str | None
    ) -> None:
        """Raises ``WrongVersion`` if ``endpoint`` has lost the adapter of ``version``."""
        if version is not None:
            wrong = WrongVersion(endpoint.url, f"has lost its adapter: {error.reason}")
            endpoint.num_failures += 1
            self._lose_confirmation(endpoint, version, wrong.reason)
            raise wrong from None

    def _check_stamps(
        self, endpoint: Endpoint, completion: Completion, version: str | None
    ) -> None:
        if version is None or all(s.version == version for s in completion.version_spans):
            return
        stamped = sorted({span.version for span in completion.version_spans})
        why = other_run(version, *stamped)
        wrong = WrongVersion(endpoint.url, f"tokens of {stamped}, asked for {version}{why}")
        endpoint.num_failures += 1
        self._lose_confirmation(endpoint, version, wrong.reason)
        raise wrong

    def _fit(
        self,
        group: GroupAssignment,
        num_prompt_tokens: int,
        sampling: SamplingConfig,
        refused_by: Endpoint | None = None,
    ) -> SamplingConfig:
        """What to ask for, and of whom (``group.need``). Raises ``PromptTooLong``.

        ``max_tokens``, or what the largest context has room for: a request goes where it fits, and
        who answers does not decide where it ends. Of the endpoints that can be used now, or else of
        all; of others than the one that it is ``refused_by`` as long as one of them is awaited.
        """
        least = num_prompt_tokens + max(1, sampling.min_tokens)
        wanted = num_prompt_tokens + sampling.max_tokens
        in_use = known = [e for e in self.endpoints if e.is_in_use and e.served is not None]
        others = [] if refused_by is None else self._awaited_beside(refused_by, group, least)
        if others:
            in_use = [e for e in others if e.served is not None]
        usable = [e for e in in_use if e.usable(group.version)]
        context = 0
        for endpoints in (usable, in_use):
            context = max((e.context for e in endpoints), default=0)
            if context >= least:
                break
        else:
            if in_use:
                raise PromptTooLong(
                    "inference.endpoints",
                    # clients of OpenAI's know a full context by its first words
                    f"This model's maximum context length is {context} tokens, in which a prompt "
                    f"of {num_prompt_tokens} leaves no room for a response; raise the servers' "
                    "--max-model-len, or lower data.max_prompt_tokens",
                )
            context = wanted  # nobody has said anything yet
        context = min(context, wanted)
        room = (0, 0) if all(e.context >= context for e in known) else (context, least)
        group.need = Need(group.version, *room, refused_by if others else None)
        if context == wanted:
            return sampling
        return sampling.model_copy(update={"max_tokens": context - num_prompt_tokens})

    def _awaited_beside(
        self, endpoint: Endpoint, group: GroupAssignment, least: int
    ) -> list[Endpoint]:
        """The others that can say something of a prompt with ``least`` tokens, now or soon."""
        limit_s = self._config.max_outage_s
        return [
            other
            for other in self.endpoints
            if other is not endpoint
            and other.is_awaited(group.version, limit_s)
            and other.may_have_room(least)
        ]

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

    def capacity(self, *, in_batch: bool) -> int:
        """Requests that the endpoints take from this process at a time.

        An endpoint that has yet to prove its weights takes none. ``in_batch``: while groups of a
        batch are asked for.
        """
        version = self._current_version
        usable = [e for e in self.endpoints if version is not None and e.usable(version)]
        return sum(self.limits.of(endpoint, in_batch=in_batch) for endpoint in usable)

    @property
    def num_devices(self) -> int:
        """Of all endpoints in use, as configured or as they say. From any thread."""
        each = self._config.devices_per_endpoint
        return sum(each or e.num_devices or 1 for e in self.endpoints if e.is_in_use)

    def is_wanted(self, before: int) -> bool:
        """Whether a group of a smaller priority than ``before``, or a sample of one, waits."""
        return self._dispatcher.is_wanted(before)

    def idle_s(self) -> float:
        """Seconds with nothing in flight since the start, mean over the endpoints there were."""
        if endpoints := self.endpoints:
            self._idle_s += sum(e.take_idle_s() for e in endpoints) / len(endpoints)
        return self._idle_s


def _refused(refusals: Sequence[Refusal], failure: EndpointError | None = None) -> PromptRejected:
    """What each said, once, and what became of the last attempt elsewhere."""
    said = {refusal.endpoint.url: refusal.error.reason for refusal in refusals}
    if failure is not None:
        said.setdefault(failure.url, failure.reason)
    first, *others = said.items()
    reason = first[1] + "".join(f"; {url}: {reason}" for url, reason in others)
    return PromptRejected(first[0], reason)
