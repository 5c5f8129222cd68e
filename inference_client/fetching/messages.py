"""What the trainer's process and a fetcher tell each other: lists of these, as MessagePack."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np

from easyrl.completion_check import Vocabulary
from easyrl.schema import Completion, VersionSpan


class Settings(msgspec.Struct, array_like=True):
    """The first message to a fetcher."""

    vocabulary: Vocabulary  # of the policy
    delivery_delay: float  # of the time that a reply took: so long it may wait for others


class Send(msgspec.Struct, array_like=True, tag=0, gc=False):
    """A request for one response."""

    number: int
    url: str
    prompt: bytes  # int32 [P]
    sampling: bytes  # JSON
    seed: int
    api_key: str | None = None  # of the endpoint
    is_streamed: bool = False  # with others, by the endpoint's route that streams samples
    model: str | None = None  # the endpoint's adapter, by its name there


class Cancel(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Nobody waits for this request any more."""

    number: int


class Fetched(msgspec.Struct, array_like=True, tag=0, gc=False):
    """A response."""

    number: int
    token_ids: bytearray  # int32 [R]
    logprobs: bytearray  # float32 [R]
    finish_reason: str
    version_spans: tuple[VersionSpan, ...]

    @classmethod
    def of(cls, number: int, made: Completion) -> Fetched:
        return cls(
            number,
            bytearray(made.token_ids),
            bytearray(made.logprobs),
            made.finish_reason,
            made.version_spans,
        )

    def completion(self, url: str) -> Completion:
        token_ids = np.frombuffer(self.token_ids, np.int32)
        return Completion(
            token_ids=token_ids,
            logprobs=np.frombuffer(self.logprobs, np.float32),
            finish_reason=self.finish_reason,
            version_spans=self.version_spans,
            endpoint=url,
            loss_mask=np.ones(len(token_ids), dtype=bool),
        )


class Failed(msgspec.Struct, array_like=True, tag=1, gc=False):
    """A request that failed."""

    number: int
    failure: bytes  # a pickled Failure


Order: TypeAlias = Send | Cancel
Reply: TypeAlias = Fetched | Failed

encode = msgspec.msgpack.Encoder().encode
decode_replies: Any = msgspec.msgpack.Decoder(list[Reply]).decode
decode_orders: Any = msgspec.msgpack.Decoder(list[Order]).decode
