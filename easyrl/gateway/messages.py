"""What the trainer's process and the gateway tell each other: lists of these, as MessagePack."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np

from easyrl.completion_check import ANY_INT32, Vocabulary
from easyrl.config import HistoryMode, ToolParserName
from easyrl.inference_client.fetching.messages import Fetched
from easyrl.schema import Completion, VersionSpan

NO_TEMPLATE = "there is none"  # a ``template_problem``: chats cannot be rendered at all


class Settings(msgspec.Struct, array_like=True):
    """The first message to a gateway, by itself."""

    tokenizer: str  # folder
    run_key: str = ""  # accepted for each session, as its own is; empty: no such key
    model: str = "policy"  # its name in answers and in ``/v1/models``
    chat_template: str | None = None  # Jinja; None: the tokenizer's own
    chat_template_kwargs: dict[str, Any] = {}  # to each rendering
    tool_parser: ToolParserName = "auto"  # how a sampled text says its tool calls
    # of the policy; each of its ``end_ids`` ends a turn
    vocabulary: Vocabulary = ANY_INT32
    max_body_bytes: int = 16 * 2**20  # of a request
    max_long_bytes: int = 2**30  # of long bodies that wait to be rendered, of all sessions
    max_context: int | None = None  # tokens that any endpoint takes; None: nobody says
    max_requests: int = 64  # open at once in one session
    max_sessions: int = 4096  # open at once
    body_timeout_s: float = 60.0  # in which a request's body has to arrive
    idle_timeout_s: float = 6 * 3600.0  # without a request, after which a session is given up
    keep_alive_s: float = 5.0  # between the comments of a stream that waits for its turn


class Lease(msgspec.Struct, array_like=True, gc=False):
    """An endpoint that the gateway may ask itself for a session's turns, one at a time: a place
    is held there."""

    url: str
    context: int  # tokens of prompt and response together
    api_key: str | None = None
    model: str | None = None  # the endpoint's adapter, by its name there


class Open(msgspec.Struct, array_like=True, tag=0, gc=False):
    """A session begins."""

    session: str
    key: str  # of HTTP
    sampling: bytes  # JSON of the ``SamplingConfig`` that training samples with
    history: HistoryMode = "keep"
    max_turns: int = 1000
    seed: int = 0  # of the sample


class Close(msgspec.Struct, array_like=True, tag=1, gc=False):
    """A session ends: what it still asks for is refused."""

    session: str


class Answer(msgspec.Struct, array_like=True, tag=2, gc=False):
    """What was sampled for an ``Ask``, and is recorded."""

    number: int
    token_ids: bytes  # int32 [R]
    logprobs: bytes  # float32 [R]
    finish_reason: str
    version_spans: tuple[VersionSpan, ...]
    endpoint: str  # URL
    turn: str  # its id

    @classmethod
    def of(cls, number: int, made: Completion, turn: str) -> Answer:
        return cls(
            number,
            np.asarray(made.token_ids, np.int32).tobytes(),
            np.asarray(made.logprobs, np.float32).tobytes(),
            made.finish_reason,
            made.version_spans,
            made.endpoint,
            turn,
        )


class Recorded(msgspec.Struct, array_like=True, tag=6, gc=False):
    """The response to an ``Ask`` that was asked ahead is recorded, as it came."""

    number: int
    turn: str  # its id


class Refused(msgspec.Struct, array_like=True, tag=3, gc=False):
    """An ``Ask`` that is not sampled."""

    number: int
    status: int  # HTTP's
    message: str
    code: str | None = None  # of OpenAI's error object


class Lend(msgspec.Struct, array_like=True, tag=4, gc=False):
    """``lease`` is the session's from now on; None: it has none any more."""

    session: str
    lease: Lease | None = None


class Drop(msgspec.Struct, array_like=True, tag=5, gc=False):
    """Nobody needs what an endpoint was asked ahead for an ``Ask``; that itself goes on."""

    number: int


class Ready(msgspec.Struct, array_like=True, tag=0, gc=False):
    """The gateway serves."""

    port: int  # on 127.0.0.1
    template_problem: str | None = None  # why the chat template cannot continue sampled ids exactly
    tool_parser: str | None = None  # the one that was chosen; None: none reads the template's calls


class Ahead(msgspec.Struct, array_like=True, gc=False):
    """What the gateway has asked the endpoint of a lease for, with all else that training says."""

    url: str
    seed: int
    max_tokens: int
    began_s: float  # time.monotonic(), which all processes of a machine share


class Ask(msgspec.Struct, array_like=True, tag=1, gc=False):
    """A turn is to be sampled, as training samples; limits can only be narrower."""

    number: int
    session: str
    prompt_ids: bytes  # int32 [P]
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ahead: Ahead | None = None  # the gateway has asked an endpoint already


class Failed(msgspec.Struct, array_like=True, tag=1, gc=False):
    """What an endpoint that was asked ahead did not do."""

    number: int  # of the ``Ask``
    kind: str  # the name of an ``EndpointError``, or of another exception
    reason: str


class Came(msgspec.Struct, array_like=True, tag=3, gc=False):
    """What an endpoint said that was asked ahead, by the number of the ``Ask``."""

    reply: Fetched | Failed


class Working(msgspec.Struct, array_like=True, tag=2, gc=False):
    """A long request is read or worked on: if the process ends meanwhile, it may be the reason."""

    session: str
    goes_on: bool  # else it is over


class Closed(msgspec.Struct, array_like=True, tag=4, gc=False):
    """A session has ended here: all that it has asked for was told."""

    session: str


Order: TypeAlias = Open | Close | Answer | Recorded | Refused | Lend | Drop
Request: TypeAlias = Ready | Ask | Working | Came | Closed

encode = msgspec.msgpack.Encoder().encode
decode_settings: Any = msgspec.msgpack.Decoder(Settings).decode
decode_orders: Any = msgspec.msgpack.Decoder(list[Order]).decode
decode_requests: Any = msgspec.msgpack.Decoder(list[Request]).decode
