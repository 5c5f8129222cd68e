"""Sessions at a time, of the gateway, a proxy or the server itself, in a trainer's process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.parts.gateway.load import (
    ADDED_TOKENS,
    FIRST_TOKENS,
    LATENCY_S,
    NUM_TURNS,
    SAMPLED_TOKENS,
    VOCABULARY,
    Texts,
    write_tokenizer,
    write_variants,
)
from benchmarks.parts.producer.load import VERSION
from easyrl.build.episodes import EpisodeTurns
from easyrl.build.inference import Inference, open_inference, open_scoring
from easyrl.completion_check import Vocabulary
from easyrl.config import Config
from easyrl.environments.hosts import EnvironmentHosts
from easyrl.episodes.player import OnTurn
from easyrl.ledger.journal.codec import Header
from easyrl.ledger.journal.turns import TurnJournal, turns_file_name
from easyrl.runtime.workers.child_process import start_child
from easyrl.schema import Prompt

CLIENT = Path(__file__).with_name("client.py")
ROUTES = ("chat", "tokens")  # in turns, group by group
# Of sessions, made beforehand: their making takes nobody's time. More than a call plays whose
# windows are as many and as long as by default.
NUM_PROMPTS = 8192
Way = Literal["direct", "proxy", "gateway"]  # from client to server
NO_PROMPT = np.zeros(1, dtype=np.int32)  # an environment's own are asked for


@dataclass(frozen=True)
class Load:
    """How many sessions there are at a time, how many begin with the same prompt, and a seed."""

    at_a_time: int
    samples: int
    seed: int


@dataclass
class Turns:
    """What was answered, by route: seconds beyond the server's own, of each turn."""

    added_s: dict[str, list[float]] = field(default_factory=lambda: {route: [] for route in ROUTES})

    @property
    def number(self) -> int:
        return sum(map(len, self.added_s.values()))


class Sessions:
    """So many sessions at a time, one behind the other in each place; places begin staggered."""

    def __init__(
        self,
        inference: Inference,
        urls: Mapping[Way, str],
        variants: Path,
        texts: Texts,
        load: Load,
        on_turn: OnTurn,
    ) -> None:
        assert inference.episodes is not None
        (hosts,) = inference.episodes.environments
        assert isinstance(hosts, EnvironmentHosts)
        self._inference, self._player, self._hosts = inference, inference.episodes, hosts
        self._urls, self._variants, self._texts = urls, variants, texts
        self._load, self._on_turn = load, on_turn
        self._numbers = itertools.count()
        self._asked = [self._made(number) for number in range(NUM_PROMPTS)]

    async def run(self, duration_s: float, way: Way) -> Turns:
        """Begins none behind ``duration_s``, and returns when all have ended."""
        turns, end_s = Turns(), time.monotonic() + duration_s
        places = [self._place(turns, end_s, n, way) for n in range(self._load.at_a_time)]
        await asyncio.gather(*places)
        return turns

    async def _place(self, turns: Turns, end_s: float, place: int, way: Way) -> None:
        await asyncio.sleep(place / self._load.at_a_time * LATENCY_S)
        while time.monotonic() < end_s:
            number = next(self._numbers)
            route = self._route(number)
            prompt = self._prompt(number, direct=way != "gateway")
            if way == "gateway":
                turns.added_s[route] += await self._through_the_gateway(prompt, number)
            else:
                turns.added_s[route] += await self._direct(self._urls[way], prompt, number)

    async def _direct(self, url: str, prompt: Prompt, seed: int) -> list[float]:
        outcome = await self._hosts.run(f"{url}/v1", "-", prompt, NUM_TURNS * seed, lambda: 0.0)
        return list(outcome.turn_rewards)

    async def _through_the_gateway(self, prompt: Prompt, seed: int) -> list[float]:
        """As a run plays the samples of a group (``build.inference``)."""
        pool, sampling = self._inference.pool, self._inference.config.rollout
        held = pool.group(FIRST_TOKENS, SAMPLED_TOKENS, VERSION, num_samples=1, sampling=sampling)
        async with held as place:
            with closing(EpisodeTurns(pool, place)) as turns:
                made = await self._player.play(
                    prompt,
                    0,
                    sampling,
                    seed,
                    turns,
                    self._on_turn,
                    turns.put_off,
                    turns.lend_place,
                )
        assert made.episode is not None
        if made.episode.failure is not None:
            raise RuntimeError(made.episode.failure)
        return list(made.episode.turn_rewards)

    def _prompt(self, number: int, *, direct: bool) -> Prompt:
        metadata = {"direct": direct, **self._asked[number % NUM_PROMPTS]}
        return Prompt(number, NO_PROMPT, "", None, metadata=metadata)

    def _group(self, number: int) -> int:
        return number % NUM_PROMPTS // self._load.samples

    def _route(self, number: int) -> str:
        return ROUTES[self._group(number) % len(ROUTES)]

    def _made(self, number: int) -> dict[str, Any]:
        """What a session asks for; the beginning is that of its group."""
        of_group, own = random.Random(f"group {self._group(number)}"), random.Random(number)
        asked = [(of_group, FIRST_TOKENS), *[(own, ADDED_TOKENS)] * (NUM_TURNS - 1)]
        is_chat = self._route(number) == "chat"
        return {
            "is_chat": is_chat,
            "variants": str(self._variants),
            "max_tokens": SAMPLED_TOKENS,
            "texts": [self._texts.text(rng, n) if is_chat else "" for rng, n in asked],
            "token_ids": [[] if is_chat else self._texts.ids(rng, n) for rng, n in asked],
        }


@contextlib.contextmanager
def sessions(folder: Path, load: Load) -> Iterator[tuple[Inference, Sessions]]:
    """Gateway, fetcher, host, loop thread and turns on disk as in a run; server and proxy.

    The journal of turns is in ``folder``, as that of a batch's first attempt.
    """
    tokenizer = write_tokenizer(folder)
    texts, variants = Texts(tokenizer), folder / "variants.json"
    write_variants(variants, texts, tokenizer, load.seed)
    with ExitStack() as opened:
        url = _started(opened, "server", str(variants))
        urls: dict[Way, str] = {"direct": url, "proxy": _started(opened, "proxy", url)}
        config = Config.model_validate(
            {
                "model": {"path": str(folder)},
                "data": {"files": [str(folder / "none.jsonl")]},
                "rollout": {"num_generations": 1, "max_tokens": SAMPLED_TOKENS},
                "inference": {"endpoints": [url], "max_inflight": 4 * load.at_a_time},
                "scoring": {"num_workers": 1},
                "environments": [{"name": "client", "file": str(CLIENT), "max_turns": NUM_TURNS}],
            }
        )
        inference = open_inference(
            config, opened, open_scoring(config, opened), vocabulary=Vocabulary(VOCABULARY)
        )
        inference.thread.run(_confirm(inference))
        journal = TurnJournal(folder / turns_file_name(0, 0), Header("", "", VERSION))
        opened.callback(journal.close)
        of = Sessions(inference, urls, variants, texts, load, journal.add)
        yield inference, of


def _started(opened: ExitStack, part: str, told: str) -> str:
    """The URL of a part of this package that serves in a process of its own."""
    child = start_child(f"benchmarks.parts.gateway.{part}:serve")
    opened.callback(child.end)
    child.socket.sendall(told.encode())
    return f"http://127.0.0.1:{int(child.socket.recv(64))}"


async def _confirm(inference: Inference) -> None:
    for endpoint in inference.pool.endpoints:
        inference.pool.confirm(endpoint, VERSION)
