"""What a hostile environment has at hand: its session, and files in which it says what it did."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import aiohttp

HAPPENED, ANSWERED, WRONG = "happened.jsonl", "answered.jsonl", "wrong.jsonl"
MAX_TOKENS = 8
FIRST, MORE = [5, 6, 7, 8], [9, 10]  # token ids of the demo's tokenizer
CHAT, TOKENS = "/v1/chat/completions", "/inference/v1/generate"


def reward_of(token_ids: Sequence[int]) -> float:
    """Of an episode that behaves, by all that was sampled in it: differs from sample to sample."""
    return float(sum(token_ids) % 3)


_https: list[aiohttp.ClientSession] = []  # one per host process


class Scene:
    """One attempt at an episode.

    Attributes:
        keys: of all sessions that this process has seen, by URL.
        url: of its session, without a route.
        own: token ids that it has been given.
    """

    keys: ClassVar[dict[str, str]] = {}

    def __init__(self, base_url: str, key: str, prompt: Any) -> None:
        self.url, self.key, self.prompt = base_url.rstrip("/").removesuffix("/v1"), key, prompt
        self.folder = Path(prompt.metadata["folder"])
        self.own: list[int] = []
        self.keys[self.url] = key

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    @property
    def reward(self) -> float:
        return reward_of(self.own)

    # -- what is said of it

    def happened(self, what: str = "") -> None:
        """The behaviour of the record came about, now or in the next line."""
        self._mark.touch()
        self._write(HAPPENED, behaviour=self.prompt.metadata["behaviour"], what=what)

    def check(self, holds: bool, what: str) -> None:
        """Else the benchmark fails."""
        if not holds:
            self._write(WRONG, behaviour=self.prompt.metadata["behaviour"], what=what[:500])

    @property
    def has_happened(self) -> bool:
        """Whether it came about in this run before."""
        return self._mark.exists()

    @property
    def _mark(self) -> Path:
        return self.folder / f"once-{self.prompt.metadata['behaviour']}"

    def _write(self, name: str, **line: Any) -> None:
        line |= {"index": self.prompt.index, "seed": self.prompt.seed, "session": self.url}
        file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")
        finally:
            os.close(file)

    # -- turns

    async def tokens(self, token_ids: Sequence[int], **sampling: Any) -> list[int]:
        """A turn by token ids: what was sampled, written down."""
        sampling = {"max_tokens": MAX_TOKENS, **sampling}
        body = {"token_ids": list(token_ids), "sampling_params": sampling, "return_token_ids": True}
        status, answer = await self.ask(TOKENS, body)
        if status != 200:
            raise RuntimeError(f"{status}: {str(answer)[:300]}")
        return self.answered(answer)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """A turn of a chat: the message to be appended."""
        body = {"messages": list(messages), "max_tokens": MAX_TOKENS, "return_token_ids": True}
        status, answer = await self.ask(CHAT, {**body, **more})
        if status != 200:
            raise RuntimeError(f"{status}: {str(answer)[:300]}")
        self.answered(answer)
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    def answered(self, answer: Mapping[str, Any]) -> list[int]:
        """Writes down what a client was told: exactly this has to be trained."""
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        self._write(ANSWERED, prompt_ids=answer["prompt_token_ids"], token_ids=token_ids)
        self.own += token_ids
        return token_ids

    async def ask(
        self,
        path: str,
        body: Any,
        *,
        key: str | None = None,
        url: str | None = None,
        **headers: str,
    ) -> tuple[int, Any]:
        """Status and content of any request; ``body`` as JSON or bytes, ``_`` for ``-``."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named = {"Authorization": f"Bearer {self.key if key is None else key}", **named}
        async with self.http.post((url or self.url) + path, data=data, headers=named) as response:
            content = await response.read()
            try:
                return response.status, json.loads(content)
            except ValueError:
                return response.status, content

    async def refused(self, status: int, path: str, body: Any, **more: Any) -> None:
        """Asks what has to be refused."""
        got, answer = await self.ask(path, body, **more)
        self.check(got == status, f"{got}, not {status}: {str(answer)[:200]} to {str(body)[:80]}")

    @property
    def http(self) -> aiohttp.ClientSession:
        if not _https:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
            connector = aiohttp.TCPConnector(limit=0)
            _https.append(aiohttp.ClientSession(connector=connector, timeout=timeout))
        return _https[0]
