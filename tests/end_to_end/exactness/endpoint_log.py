"""What an endpoint was shown and has sampled, as a proxy before it saw it, and comparisons with it.

The log is made of requests and replies on the wire, and of nothing that the trainer has kept.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson
from aiohttp import web

from easyrl.inference_client.sample_stream import SAMPLES
from easyrl.runtime.frames import FrameSplitter
from easyrl.schema import Completion, MicroBatch, Segment
from tests.end_to_end.exactness.agents import PATIENCE_S
from tests.end_to_end.proxy import GENERATE, Proxy

HOLD_S = 3 * PATIENCE_S


class LoggedTurn(NamedTuple):
    """One request, and its answer."""

    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]  # float32, of the sampled
    finish_reason: str
    versions: tuple[str, ...]  # stamps


class TrainedToken(NamedTuple):
    """A token that is trained, or was sampled, with all that stands before it."""

    context: bytes  # int32 [n]
    token: int
    logprob: float  # float32


class RecordingProxy(Proxy):
    """Logs what is sampled, and holds back replies to prompts with ``slow`` in them.

    ``after``: called once, when so many turns are in the log.
    """

    hides_streams = False
    slow: Sequence[int] = ()  # token ids; none: nothing is held

    def __init__(
        self, upstream: str, after: tuple[int, Callable[[], object]] | None = None
    ) -> None:
        self.log: list[LoggedTurn] = []
        self._after = after
        super().__init__(upstream)

    async def answer(self, request: web.Request, body: bytes) -> web.Response | None:
        if request.path not in (GENERATE, SAMPLES):
            return None
        asked = orjson.loads(body)
        response = await self.forward("POST", request.path_qs, body)
        assert isinstance(response.body, bytes)
        if response.status == 200:
            read = _streamed if request.path == SAMPLES else _single
            turns = list(read(asked, response.body))
            self.log += turns
            if self._after is not None and len(self.log) >= self._after[0]:
                (_, call), self._after = self._after, None
                call()
            slow = _bytes(self.slow)
            if slow and any(slow in _bytes(turn.prompt) for turn in turns):
                await asyncio.sleep(HOLD_S)
        return response


def _single(asked: dict[str, Any], body: bytes) -> Iterator[LoggedTurn]:
    """Of vLLM's route: JSON."""
    if asked["sampling_params"].get("logprobs") is None:
        return  # a question of the trainer's client, whether the server applies stop strings
    for choice in orjson.loads(body)["choices"]:
        yield LoggedTurn(
            tuple(asked["token_ids"]),
            tuple(choice["token_ids"]),
            _float32(token["logprob"] for token in choice["logprobs"]["content"]),
            choice["finish_reason"],
            tuple(span["version"] for span in choice["weight_versions"]),
        )


def _streamed(asked: dict[str, Any], body: bytes) -> Iterator[LoggedTurn]:
    """Of the embedded server's: frames of lists ``[0, index, why it ended, ids, …]``."""
    prompts = [tuple(each["token_ids"]) for each in asked["prompts"] for _ in each["seeds"]]
    for payload in FrameSplitter().feed(body):
        for kind, index, finish_reason, ids, logprobs, spans, _ in msgspec.msgpack.decode(payload):
            assert kind == 0, "a sample was refused"
            yield LoggedTurn(
                prompts[index],
                tuple(np.frombuffer(ids, "<i4").tolist()),
                _float32(np.frombuffer(logprobs, "<f4").tolist()),
                finish_reason,
                tuple(version for version, _, _ in spans),
            )


def recorded_turns(completion: Completion) -> list[LoggedTurn]:
    """The same of an episode in the journal: each turn with all of its ancestors before it."""
    assert completion.episode is not None
    turns, ids = completion.episode.turns, completion.token_ids
    whole: list[tuple[int, ...]] = []  # of each turn: prompt and sampled
    recorded = []
    for turn in turns:
        before = () if turn.parent is None else whole[turn.parent]
        prompt = (*before, *ids[turn.start : turn.sampled].tolist())
        sampled = tuple(ids[turn.sampled : turn.end].tolist())
        assert completion.loss_mask[turn.sampled : turn.end].all()
        assert not completion.loss_mask[turn.start : turn.sampled].any()
        whole.append((*prompt, *sampled))
        stamps = [s for s in completion.version_spans if turn.sampled <= s.start < turn.end]
        recorded.append(
            LoggedTurn(
                prompt,
                sampled,
                _float32(completion.logprobs[turn.sampled : turn.end]),
                turn.finish_reason,
                tuple(span.version for span in stamps),
            )
        )
    return recorded


def sampled_tokens(log: Iterable[LoggedTurn]) -> Counter[TrainedToken]:
    """Each token of the log, with all that the model was shown before it."""
    tokens: Counter[TrainedToken] = Counter()
    for turn in log:
        whole, start = _bytes([*turn.prompt, *turn.sampled]), len(turn.prompt)
        for n, (token, logprob) in enumerate(zip(turn.sampled, turn.logprobs, strict=True)):
            tokens[TrainedToken(whole[: 4 * (start + n)], token, logprob)] += 1
    return tokens


def trained_tokens(rows: Iterable[MicroBatch]) -> Counter[TrainedToken]:
    """The same of packed rows: before a token stands what its predictor attends to."""
    tokens: Counter[TrainedToken] = Counter()
    for row in rows:
        ids = row.input_ids.tolist()
        assert (row.loss_weights > 0).all()
        predictions = zip(
            row.predictor_index.tolist(),
            row.label_ids.tolist(),
            row.inference_logprobs.tolist(),
            strict=True,
        )
        for place, token, logprob in predictions:
            context = _attended(row.segments, place)
            assert row.position_ids[place] == len(context) - 1
            tokens[TrainedToken(_bytes([ids[at] for at in context]), token, logprob)] += 1
    return tokens


def _attended(segments: Sequence[Segment], place: int) -> list[int]:
    """Row positions that ``place`` attends to, itself the last."""
    number = next(n for n, s in enumerate(segments) if s.start <= place < s.start + s.length)
    attended = list(range(segments[number].start, place + 1))
    while (number := segments[number].parent) >= 0:
        start, length, _ = segments[number]
        attended = [*range(start, start + length), *attended]
    return attended


def _float32(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(np.array(list(values), np.float32).tolist())


def _bytes(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<i4").tobytes()
