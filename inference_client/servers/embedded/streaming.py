"""Samples that are sent while others of the same request are still being made."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from concurrent.futures import Future
from functools import partial

import numpy as np
from aiohttp import web

from easyrl.inference_client.sample_stream import (
    LOGPROBS,
    TOKEN_IDS,
    Ended,
    Refused,
    Sampled,
    frame_of,
)
from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.requests import (
    BadRequestError,
    GenerationRequest,
    Sequence,
    UnavailableError,
)

Finished = Future[list[Sequence]]


class SampleStream:
    """The samples of one HTTP request: each a request to the engine, sent when it has finished.

    Those that finish in one decode step are sent together. Leaving ``send`` by a client that has
    gone aborts what is left.
    """

    def __init__(self, engine: EmbeddedEngine, requests: list[GenerationRequest]) -> None:
        self._engine = engine
        self._requests = dict(enumerate(requests))  # that have not been sent
        self._loop = asyncio.get_running_loop()
        self._ended: deque[tuple[int, Finished]] = deque()  # and not sent yet
        self._some = asyncio.Event()
        self._is_told = False  # that there are some

    async def send(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        try:
            refused = self._submit()
            await response.prepare(http)  # behind it: who sees a status may abort any of them
            while True:
                if ended := [*refused, *self._take()]:
                    await response.write(frame_of(ended))
                if not self._requests:
                    return response
                refused = []
                await self._some.wait()
        except BaseException:
            with contextlib.suppress(UnavailableError):  # the engine ends them itself
                for request in self._requests.values():
                    if not request.future.done():
                        self._engine.abort(request)
            raise

    def _submit(self) -> list[Ended]:
        """Those that the engine does not take."""
        requests = list(self._requests.values())
        for index, request in enumerate(requests):  # before the engine can have ended one
            request.future.add_done_callback(partial(self._note, index))
        refused: list[Ended] = []
        for index, error in self._engine.submit_together(requests).items():
            status = 400 if isinstance(error, BadRequestError) else 503
            refused.append(Refused(index, status, str(error)))
            del self._requests[index]
        return refused

    def _note(self, index: int, finished: Finished) -> None:
        """In the engine's thread; the loop is woken once for all samples of a decode step."""
        self._ended.append((index, finished))
        if not self._is_told:
            self._is_told = True
            self._engine.news.add(self._loop, self._some)

    def _take(self) -> list[Ended]:
        self._some.clear()
        self._is_told = False  # before it looks: what comes now is either seen or told
        taken = []
        while self._ended:
            index, finished = self._ended.popleft()
            taken.append(_ended(index, finished))
            del self._requests[index]  # with all of its lists
        return taken


def _ended(index: int, finished: Finished) -> Ended:
    if (error := finished.exception()) is not None:
        return Refused(index, 503, str(error))
    (sample,) = finished.result()
    return Sampled(
        index,
        sample.finish_reason or "",
        np.array(sample.token_ids, dtype=TOKEN_IDS).tobytes(),
        np.array(sample.logprobs, dtype=LOGPROBS).tobytes(),
        sample.version_spans,  # type: ignore[arg-type]  # names of the same three fields
        len(sample.prompt),
    )
