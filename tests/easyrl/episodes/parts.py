"""An endpoint, a gateway and an environment that a test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from easyrl.config import HistoryMode, OnFailure, SamplingConfig
from easyrl.environments.host_process import ToolCallTime
from easyrl.episodes.session import Session
from easyrl.inference_client.pool.asked_ahead import AskedAhead
from easyrl.schema import Completion, Prompt, VersionSpan

IDS = np.array([5, 6, 7], dtype=np.int32)
VERSION = "run:0:1"


def sampled(token_ids: np.ndarray, url: str = "http://fake") -> Completion:
    length = len(token_ids)
    return Completion(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.full(length, -0.5, dtype=np.float32),
        finish_reason="stop",
        version_spans=(VersionSpan(VERSION, 0, length),),
        endpoint=url,
        loss_mask=np.ones(length, dtype=bool),
        proof=1,
    )


@dataclass
class Endpoint:
    """Answers with tokens that its seed decides; behind a gate, or with an error first."""

    gated: bool = False
    errors: list[Exception] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    sampling: list[SamplingConfig] = field(default_factory=list)
    prompts: list[np.ndarray] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)  # of the first answers

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()

    async def __call__(
        self,
        ids: np.ndarray,
        sampling: SamplingConfig,
        seed: int,
        ahead: AskedAhead | None = None,
    ) -> Completion:
        self.seeds.append(seed)
        self.sampling.append(sampling)
        self.prompts.append(ids)
        if self.gated:
            await self.gate.wait()
        if self.delays_s:
            await asyncio.sleep(self.delays_s.pop(0))
        if self.errors:
            raise self.errors.pop(0)
        return sampled(np.random.default_rng(seed).integers(0, 50, sampling.max_tokens))

    async def asked(self) -> None:
        while not self.seeds:
            await asyncio.sleep(0.001)


@dataclass
class OpenGateway:
    """A gateway without HTTP: environments find its sessions by their URLs."""

    sessions: dict[str, Session] = field(default_factory=dict)

    @asynccontextmanager
    async def serves(self, session: Session) -> AsyncIterator[str]:
        self.sessions[session.id] = session
        yield session.id


@dataclass
class Said:
    reward: float
    components: dict[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] | dict[str, float] = ()
    tool_calls: tuple[ToolCallTime, ...] = ()


Rollout = Callable[[Session, Prompt], Awaitable[Said]]


@dataclass
class Environment:
    """Runs a coroutine of the test."""

    gateway: OpenGateway
    rollout: Rollout
    name: str = "game"
    max_turns: int = 20
    history: HistoryMode = "keep"
    on_failure: OnFailure = "mask"
    num_hung_threads: int = 0
    alone: list[bool] = field(default_factory=list)  # of each start

    async def run(
        self,
        url: str,
        key: str,
        prompt: Prompt,
        seed: int,
        idle_s: Callable[[], float],
        alone: bool = False,
    ) -> Said:
        self.alone.append(alone)
        return await self.rollout(self.gateway.sessions[url.removesuffix("/v1")], prompt)
