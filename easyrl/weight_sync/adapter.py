"""Adapter-only sync (``weight_sync.lora``): the model is proved where it is, the adapter travels.

    W, frozen: each endpoint has loaded it from ``model.path`` and proves it, and is never sent it
    A and alpha / rank · B: written once per batch, sent, loaded under the version's name, proved

``AdapterChoice`` decides, before a run's first version, whether that is done or the whole model is
sent with the adapter merged into it; ``AdapterForm`` is what is done then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Literal

from easyrl.config import LoraConfig
from easyrl.engines.base import TrainEngine
from easyrl.inference_client.adapters import adapter_limits
from easyrl.inference_client.errors import EndpointError, NotAnswered
from easyrl.inference_client.pool.endpoint_pool import Endpoint, EndpointPool
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import PolicyVersion
from easyrl.weight_sync.proof import Prover
from easyrl.weight_sync.push import still_answers
from easyrl.weight_sync.store import NamedWeights, WeightStore
from easyrl.weight_sync.target import ServedAdapter, Target

logger = logging.getLogger(__name__)

SCALED = ".lora_B.weight"  # end of the names of what the scaling is folded into
MERGED = "or set weight_sync.lora=merged, which sends the whole model"


@dataclass(frozen=True)
class AdapterForm:
    """What is sent of a policy with adapters, and what every endpoint has to have below it.

    Attributes:
        base: the model without adapters, on rank 0's host; None on other ranks.
    """

    lora: LoraConfig
    base: Target | None

    def weights(self, engine: TrainEngine) -> NamedWeights:
        """The adapter as it is served: ``A``, and ``B`` with the scaling folded in. Collective."""
        return served_adapter(engine, self.lora)

    def dress(self, target: Target) -> Target:
        """``target`` as a version of the adapter: its name at the endpoints is the version's."""
        target.adapter = ServedAdapter(target.name, self.lora.rank, self.base)
        return target


def served_adapter(engine: TrainEngine, lora: LoraConfig) -> NamedWeights:
    """``A`` [rank, inputs] and ``alpha / rank · B`` [outputs, rank] of each layer. Collective.

    In the trainer's dtype, rounded once: an endpoint that serves these adds ``B A x`` as the
    trainer adds ``alpha / rank · B A x``.
    """
    scaling = lora.alpha / lora.rank
    for name, weight in engine.named_weights("adapter"):
        yield name, weight * scaling if name.endswith(SCALED) else weight


def write_base(
    name: str,
    engine: TrainEngine,
    store: WeightStore,
    thread: LoopThread,
    collectives: Collectives,
) -> Target | None:
    """The model without adapters into rank 0's shared folder, as version ``name``; nobody is sent
    it. None on other ranks. Collective.
    """
    weights = engine.named_weights("base")
    if collectives.ranks.rank > 0:
        for _ in weights:
            pass
        return None
    base = store.begin(name)
    store.write(base, weights, thread.loop)
    thread.run(base.completed())
    return base


async def refusal(endpoint: Endpoint, lora: LoraConfig) -> str | None:
    """Why ``endpoint`` cannot serve an adapter of this form, with the remedy; None if it can.

    Raises ``EndpointError`` if it does not answer.
    """
    if endpoint.served is not None and endpoint.served.is_embedded:
        return "the embedded server takes no adapters: use vLLM"
    try:
        limits = await adapter_limits(endpoint.client)
    except EndpointError as error:
        if isinstance(error, NotAnswered) or not await still_answers(endpoint):
            raise
        return f"does not say what adapters it takes ({error.reason}): install its plugin again"
    return limits.refusal(lora.rank, lora.target_modules)


@dataclass(kw_only=True)
class AdapterChoice:
    """Decides whether adapters travel alone. Its methods are called by all ranks.

    Attributes:
        wanted: ``weight_sync.lora``.
    """

    wanted: Literal["auto", "merged", "adapter"]
    lora: LoraConfig | None
    engine: TrainEngine
    pool: EndpointPool
    thread: LoopThread
    collectives: Collectives
    store: WeightStore
    prover: Prover

    def decide(self, version: PolicyVersion) -> AdapterForm | None:
        """The form of the run's versions; None: the whole model, an adapter merged. Collective.

        With ``auto`` one endpoint that cannot, of those that are up, decides it for all, and the
        whole model is sent where nobody would prove the one below; with ``adapter`` an endpoint
        that cannot is excluded, by name and reason, and so is one that comes later.
        """
        if self.lora is None or self.wanted == "merged":
            return None
        if self.wanted == "auto" and not self.prover.reads_bits:
            return None
        is_first = self.collectives.ranks.rank == 0
        problems = self.thread.run(self._refusals()) if is_first else {}
        if not self._goes_on(problems):
            return None
        name = f"{version.run}:{version.attempt}:base"
        base = write_base(name, self.engine, self.store, self.thread, self.collectives)
        if self.wanted == "auto":
            problems = {} if base is None else self.thread.run(self._other_models(base))
            if not self._goes_on(problems):
                self.store.discard(base)
                return None
        return AdapterForm(self.lora, base)

    def _goes_on(self, problems: Mapping[str, str]) -> bool:
        """What rank 0 found wrong by URL, told and acted upon on every rank. Collective."""
        problems = self.collectives.broadcast(problems)
        if self.wanted == "auto":
            for url, problem in problems.items():
                logger.warning(
                    "weight_sync.lora: the whole model is sent at every sync, the adapter merged "
                    "into it, since %s %s",
                    url,
                    problem,
                )
            return not problems

        async def exclude() -> None:
            for endpoint in self.pool.endpoints:
                if endpoint.url in problems and endpoint.excluded is None:
                    self.pool.exclude(endpoint, f"{problems[endpoint.url]}, {MERGED}")

        self.thread.run(exclude())
        return True

    async def _refusals(self) -> dict[str, str]:
        assert self.lora is not None
        asked = {e.url: refusal(e, self.lora) for e in self.pool.endpoints if e.is_up}
        return await _texts(asked)

    async def _other_models(self, base: Target) -> dict[str, str]:
        async def told(endpoint: Endpoint) -> str | None:
            await endpoint.client.init_weight_transfer(await self.store.init_info(endpoint.url))
            try:
                await self.prover.prove_base(endpoint, base)
            except EndpointError as error:
                if not await still_answers(endpoint):
                    raise
                return error.reason
            return None

        return await _texts({e.url: told(e) for e in self.pool.endpoints if e.is_up})


async def _texts(asked: Mapping[str, Awaitable[str | None]]) -> dict[str, str]:
    """Those that came to a text, by URL; one that is down is brought to the version later."""
    found = await asyncio.gather(*asked.values(), return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException) and not isinstance(each, EndpointError):
            raise each
    return {url: said for url, said in zip(asked, found, strict=True) if isinstance(said, str)}
