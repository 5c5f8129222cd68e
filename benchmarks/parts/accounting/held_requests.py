"""Delays of single requests, and the orders in which a batch's requests have to be for them.

All batches of a run have the order; a ``Delay`` says which of them are held up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks.parts.accounting.delays import Delay
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.inference_client.errors import EndpointUnavailable
from easyrl.inference_client.pool.endpoint_pool import EndpointPool

Plant = Callable[[Delay], None]
EVALUATED_TOKENS = 8  # at most, of a response of an evaluation; training's have more
UNTIL_SENT_S = 0.1  # after which a batch's first requests are under way


class Asked:
    """Requests that endpoints have not answered, and the last prompt that the batch has to have."""

    def __init__(self) -> None:
        self.num_open = 0
        self._last: Any = None

    def install(self) -> None:
        draw, ask = RolloutGenerator._group, EndpointPool.ask

        async def group(generator: Any, position: int, prompt: Any, run: Any) -> Any:
            if position == run.draws.membership.batch_size - 1:
                self._last = prompt.token_ids
            return await draw(generator, position, prompt, run)

        async def counted(pool: Any, *arguments: Any, **named: Any) -> Any:
            self.num_open += 1
            try:
                return await ask(pool, *arguments, **named)
            finally:
                self.num_open -= 1

        RolloutGenerator._group = group  # type: ignore[method-assign]
        EndpointPool.ask = counted  # type: ignore[method-assign]

    def is_last(self, token_ids: Any) -> bool:
        return token_ids is self._last

    async def all_answered(self) -> None:
        while self.num_open:
            await asyncio.sleep(1e-3)


def watched() -> Asked:
    asked = Asked()
    asked.install()
    return asked


def first_requests(delay: Delay) -> None:
    """Those with which a batch begins are answered later.

    They keep their places meanwhile: what is sent behind them is as much later.
    """
    ask = EndpointPool.ask

    async def held_up(*arguments: Any, **named: Any) -> Any:
        late_s = delay.due_s
        answer = await ask(*arguments, **named)
        if late_s:
            await asyncio.sleep(late_s)
            delay.take()  # others begin behind the first answer
        return answer

    EndpointPool.ask = held_up  # type: ignore[method-assign]


def last_group(delay: Delay) -> None:
    """Those of the last group are answered behind all others, so that nothing else covers them."""
    asked = watched()
    _answered_last(asked, delay, lambda endpoint, ids, sampling: asked.is_last(ids))


def one_of_an_endpoint(delay: Delay) -> None:
    """One of the first of an endpoint is answered behind all others, also other endpoints'."""
    urls: set[str] = set()

    def is_chosen(endpoint: Any, ids: Any, sampling: Any) -> bool:
        urls.add(endpoint.url)
        return endpoint.url == min(urls) and delay.begins()

    _answered_last(watched(), delay, is_chosen)


def evaluations(delay: Delay) -> None:
    """An evaluation's are answered when training's are."""
    _answered_last(
        watched(),
        delay,
        lambda endpoint, ids, sampling: sampling.max_tokens == EVALUATED_TOKENS,
        after_s=UNTIL_SENT_S,
    )


def _answered_last(
    asked: Asked,
    delay: Delay,
    is_chosen: Callable[[Any, Any, Any], bool],  # endpoint, prompt's token ids, sampling
    after_s: float = 0.0,
) -> None:
    """Chosen requests are answered behind all others, and ``delay`` later.

    ``after_s``: what passes before the others are looked for.
    """
    counted = EndpointPool.ask

    async def ask(
        pool: Any, endpoint: Any, ids: Any, sampling: Any, *more: Any, **named: Any
    ) -> Any:
        is_late = is_chosen(endpoint, ids, sampling)
        answer = await counted(pool, endpoint, ids, sampling, *more, **named)
        if is_late:
            await asyncio.sleep(after_s)
            await asked.all_answered()
            await asyncio.sleep(delay.of_batch_s)
        return answer

    EndpointPool.ask = ask  # type: ignore[method-assign]


def failing_request(delay: Delay) -> None:
    """One of the last group fails when all others are answered, and is asked again."""
    asked = watched()
    counted = EndpointPool.ask

    async def ask(pool: Any, endpoint: Any, prompt_token_ids: Any, *more: Any, **named: Any) -> Any:
        if asked.is_last(prompt_token_ids) and delay.begins():
            await asyncio.sleep(UNTIL_SENT_S)
            await asked.all_answered()
            await asyncio.sleep(delay.of_batch_s)
            raise EndpointUnavailable(endpoint.url, "planted")
        return await counted(pool, endpoint, prompt_token_ids, *more, **named)

    EndpointPool.ask = ask  # type: ignore[method-assign]


def rejected_last_group(delay: Delay) -> None:
    """The last group is answered behind all others and rejected: more prompts are drawn then."""
    last_group(delay)
    produce = RolloutGenerator.produce_batch

    def produce_batch(generator: Any, draws: Any, prompt_at: Any, version: Any, **more: Any) -> Any:
        last = prompt_at(draws.membership.batch_size - 1)

        def accept(group: Any) -> str | None:
            return "planted" if group.prompt.key == last.key else None

        return produce(generator, draws, prompt_at, version, **(more | {"accept": accept}))

    RolloutGenerator.produce_batch = produce_batch  # type: ignore[method-assign]
