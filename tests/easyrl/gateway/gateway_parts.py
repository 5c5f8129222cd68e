"""A gateway in this process, a trainer's end that answers as a test says, and chat tokenizers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from easyrl.completion_check import Vocabulary
from easyrl.config import SamplingConfig
from easyrl.gateway.messages import (
    Answer,
    Ask,
    Came,
    Close,
    Closed,
    Failed,
    Open,
    Ready,
    Recorded,
    Refused,
    Settings,
    Working,
    decode_requests,
    encode,
)
from easyrl.gateway.process import serve
from easyrl.inference_client.fetching.messages import Fetched
from easyrl.runtime.frames import FrameSplitter, frame
from easyrl.schema import VersionSpan

START, END = "<|im_start|>", "<|im_end|>"
OTHER_END = "<|eom|>"  # that a model may end a turn with, and no template writes
STAMP, KEY, SESSION = "run:1:0", "secret", "s1"

_TOOLS = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
    "</tools> as <tool_call>{...}</tool_call><|im_end|>\n{% endif %}"
)
_CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_TOOL_ANSWER = (
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}"
)
_GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Qwen's form: what was answered is rendered as it was said
PLAIN = (
    _TOOLS
    + "{% for m in messages %}"
    + _TOOL_ANSWER
    + "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + _CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}"
    + _GENERATION
)
# ... without the reasoning of all but the last message
STRIPPING = PLAIN.replace(
    "{{ m.content or '' }}",
    "{% set said = m.content or '' %}"
    "{% if not loop.last %}{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ said }}",
)
# Mistral's form: roles alternate where no tool is called, and a message is content or calls
ALTERNATING = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[RESULT] {{ m.content }}[/RESULT]"
    "{% elif m.tool_calls %}[CALLS] {% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{% endfor %}<|im_end|>"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


def chat_tokenizer(chat_template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    """Bytes, and a few pairs of them: most texts have several tokenisations."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "n"), ("t", "h"), ("th", "e"), ("e", "r"), ("i", "n"), ("Ġ", "the")]
    words = [*letters, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, additional_special_tokens=[START, OTHER_END]
    )
    tokenizer.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>")])
    tokenizer.chat_template = chat_template
    return tokenizer


class Trainer:
    """The trainer's end: answers each ``Ask`` with the next of ``says``, and remembers both.

    ``says``: token ids, a text (tokenised, and ended), or a ``Refused``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, connection: socket.socket) -> None:
        self.tokenizer = tokenizer
        self.asked: list[Ask] = []
        self.working: list[Working] = []
        self.answered: list[list[int]] = []  # sampled ids
        self.closed: list[str] = []
        self.came: list[Fetched | Failed] = []  # what endpoints said that the gateway has asked
        self.says: list[Any] = []
        self.finish_reason = "stop"
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.num_beats = 0
        self._connection = connection

    def send(self, *orders: Any) -> None:
        self._writer.write(frame(encode(list(orders))))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, number: int) -> list[int]:
        return np.frombuffer(self.asked[number].prompt_ids, np.int32).tolist()

    def prompt_text(self, number: int) -> str:
        return self.tokenizer.decode(self.prompt(number), clean_up_tokenization_spaces=False)

    async def run(self, settings: Settings) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)
        self._writer.write(frame(encode(settings)))
        frames, tasks = FrameSplitter(), set()
        while data := await reader.read(2**16):
            for payload in frames.feed(data):
                self.num_beats += 1
                for request in decode_requests(payload):
                    if isinstance(request, Ready):
                        self.ready.set_result(request)
                    elif isinstance(request, Working):
                        self.working.append(request)
                    elif isinstance(request, Closed):
                        self.closed.append(request.session)
                    elif isinstance(request, Came):
                        self.came.append(request.reply)
                    else:
                        task = asyncio.create_task(self._answer(request))
                        tasks.add(task)
                        task.add_done_callback(tasks.discard)

    async def _answer(self, asked: Ask) -> None:
        self.asked.append(asked)
        said = self.says.pop(0) if self.says else f"answer {len(self.asked)}"
        while asked.ahead is not None and asked.number not in [c.number for c in self.came]:
            await asyncio.sleep(0.005)
        await self.may_answer.wait()
        if any(isinstance(c, Fetched) and c.number == asked.number for c in self.came):
            self.send(Recorded(asked.number, f"turn-{SESSION}-{asked.number}"))
            return
        if isinstance(said, Refused):
            self.send(Refused(asked.number, said.status, said.message, said.code))
            return
        ids = said if isinstance(said, list) else self.ids(said + END)
        self.answered.append(ids)
        self.send(answer_of(asked.number, ids, self.finish_reason))

    def close(self) -> None:
        self._writer.close()


def answer_of(number: int, ids: list[int], finish_reason: str = "stop") -> Answer:
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8
    spans = (VersionSpan(STAMP, 0, len(ids)),)
    sampled = np.array(ids, np.int32).tobytes()
    said = sampled, logprobs.tobytes(), finish_reason, spans, "http://endpoint"
    return Answer(number, *said, f"turn-{SESSION}-{number}")


class Served:
    """A running gateway and its trainer."""

    def __init__(self, trainer: Trainer, port: int, http: aiohttp.ClientSession) -> None:
        self.trainer, self.root, self.http = trainer, f"http://127.0.0.1:{port}", http
        self.url = f"{self.root}/sessions/{SESSION}"

    async def post(
        self, body: Any, path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer; ``headers`` with ``_`` for ``-``."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named = {"Authorization": f"Bearer {KEY}", **named}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data, headers=named) as response:
            return response.status, await response.json()

    async def chat(self, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
        """The assistant's message of an answer, as a client sends it back."""
        status, answer = await self.post({"messages": list(messages), **more})
        assert status == 200, answer
        return answer["choices"][0]["message"]


@asynccontextmanager
async def served(
    folder: Path,
    chat_template: str | None = PLAIN,
    *,
    history: str = "keep",
    sampling: SamplingConfig | None = None,
    open_session: bool = True,
    end_ids: Collection[int] | None = None,
    vocabulary: Vocabulary | None = None,
    open_as: Open | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    tokenizer = chat_tokenizer(chat_template)
    tokenizer.save_pretrained(folder)
    ours, theirs = socket.socketpair()
    trainer = Trainer(tokenizer, ours)
    serving = asyncio.create_task(serve(theirs))
    ends = frozenset([tokenizer.eos_token_id] if end_ids is None else end_ids)
    vocabulary = vocabulary or Vocabulary(len(tokenizer), ends)
    whole = Settings(str(folder), vocabulary=vocabulary, **settings)
    running = asyncio.create_task(trainer.run(whole))
    try:
        done, _ = await asyncio.wait(
            [serving, running, trainer.ready], return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        ready = trainer.ready.result()
        if open_session:
            told = (sampling or SamplingConfig()).model_dump_json().encode()
            trainer.send(open_as or Open(SESSION, KEY, told, history))
        async with aiohttp.ClientSession() as http:
            gateway = Served(trainer, ready.port, http)
            await until_open(gateway)
            yield gateway
    finally:
        trainer.close()
        await asyncio.wait_for(serving, 10)
        running.cancel()


async def until_open(gateway: Served) -> None:
    """A message over the socket may be slower than a connection."""
    async with gateway.http.get(gateway.root + "/health") as response:
        assert response.status == 200


async def until(condition: Callable[[], Any], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(call: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def close() -> Close:
    return Close(SESSION)


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}


def call_text(**arguments: Any) -> str:
    said = json.dumps({"name": "add", "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"
