"""What ``easyrl doctor`` asks of every endpoint that is up."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import aiohttp
import psutil

from easyrl.build.recipe import pack_in_order
from easyrl.completion_check import Vocabulary
from easyrl.config import Config
from easyrl.doctor.agreement import agreement_findings, sampled_groups
from easyrl.doctor.architecture import architecture_finding
from easyrl.doctor.endpoints import Reached, context_finding, reach
from easyrl.doctor.finding import Finding, failed, finding_of, findings_of, not_checked
from easyrl.doctor.policy_folder import PolicyFolder
from easyrl.doctor.sizes import size
from easyrl.doctor.tokens import template_finding, tokenizer_finding
from easyrl.doctor.weight_route import weight_route_finding
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.client import EndpointClient, TensorShapes
from easyrl.inference_client.errors import EndpointError
from easyrl.inference_client.vllm_plugin.easyrl_vllm.chunk_format import DTYPES
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import Prompt, RolloutGroup
from easyrl.weight_sync.store import WeightStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER_S = 60.0  # for an answer that is no sample
SAMPLES_S = 300.0  # for all of an endpoint's samples
NUM_PROMPTS = 8  # that each endpoint answers
ROOM = 1.2  # of the weights' bytes, for loading the model here


@dataclass(frozen=True)
class Policy:
    """What endpoints are compared with."""

    shapes: TensorShapes
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    prompts: Sequence[Prompt]


def check_endpoints(config: Config, policy: Policy) -> Iterator[Finding]:
    """Of ``inference.endpoints``; the servers of ``inference.launch`` come and go with a run."""
    if config.inference.launch is not None:
        yield not_checked(
            "inference.launch",
            "its servers are started with the run",
            "start one by hand and name it in inference.endpoints to have it checked",
        )
    sampled: dict[str, list[RolloutGroup]] = {}
    with LoopThread() as thread, closing(WeightStore(config.weight_sync, _run_name())) as store:
        for url in config.inference.urls:

            def look(url: str = url) -> list[Finding]:
                return thread.run(_Look(config, policy, store, sampled).at(url))

            yield from findings_of(f"endpoint {url}", look)
    if sampled:
        yield from findings_of("log-probabilities", lambda: _agreement(config, policy, sampled))


def _run_name() -> str:
    return f"doctor-{secrets.token_hex(4)}"


class _Look:
    """``sampled`` receives the responses of endpoints whose log-probabilities can be compared."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        store: WeightStore,
        sampled: dict[str, list[RolloutGroup]],
    ) -> None:
        self._config, self._policy = config, policy
        self._store, self._sampled = store, sampled

    async def at(self, url: str) -> list[Finding]:
        config, policy = self._config, self._policy
        async with _client(config, url) as client:
            first, reached = await reach(client)
            found = [first]
            if reached is None:
                return found
            architecture = await architecture_finding(client, config.model, policy.shapes)
            found += [architecture, context_finding(config, reached)]
            tokenizer, prompt = policy.tokenizer, policy.prompts[0]
            found.append(
                await finding_of(
                    f"tokenizer of {url}", tokenizer_finding(config, tokenizer, reached, prompt)
                )
            )
            found.append(
                await finding_of(
                    f"chat template of {url}", template_finding(config, tokenizer, reached)
                )
            )
            if architecture.verdict == "failed":
                return found
            found.append(await finding_of(f"weight transfer to {url}", self._weight_route(reached)))
            return found + await self._sample(reached)

    async def _weight_route(self, reached: Reached) -> Finding:
        self._store.begin("doctor")
        folder = PolicyFolder(self._config.model, self._policy.shapes)
        return await weight_route_finding(self._config, reached, self._store, folder)

    async def _sample(self, reached: Reached) -> list[Finding]:
        """Nothing where it can be compared later."""
        config, policy = self._config, self._policy
        name = f"log-probabilities of {reached.url}"
        if reached.has_run_weights:
            return [not_checked(name, f"it serves {reached.version}, not {config.model.path}")]
        if problem := _why_not_here(config, policy):
            return [not_checked(name, problem)]
        prompts = policy.prompts[:NUM_PROMPTS]
        try:
            async with asyncio.timeout(SAMPLES_S):
                self._sampled[reached.url] = await sampled_groups(
                    config, reached, prompts, policy.vocabulary
                )
        except TimeoutError:
            said = f"it has not answered {len(prompts)} prompts within {SAMPLES_S:g} s"
            return [failed(name, said, "see what it does; use another in inference.endpoints")]
        except EndpointError as error:
            said = f"it does not answer prompts ({error.reason:.300})"
            return [failed(name, said, "start it as docs/endpoints.md says")]
        return []


def _why_not_here(config: Config, policy: Policy) -> str | None:
    """Why the policy cannot be loaded in this process; None if it can."""
    if config.parallel.is_split:
        return f"{config.parallel.split_key} splits the model, which this process has no part of"
    sizes = (prod(shape) * DTYPES[dtype].itemsize for dtype, shape in policy.shapes.values())
    needed, free = ROOM * sum(sizes), psutil.virtual_memory().available
    if needed > free:
        return f"the model needs {size(needed)} here, {size(free)} are available"
    return None


def _agreement(
    config: Config, policy: Policy, sampled: dict[str, list[RolloutGroup]]
) -> list[Finding]:
    return agreement_findings(config, sampled, pack_in_order(config))


@asynccontextmanager
async def _client(config: Config, url: str) -> AsyncIterator[EndpointClient]:
    key = ApiKeys.read(config.inference).of(url)
    # no cookies: what one endpoint sets would go to others on its host
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield EndpointClient(url, session, key, ANSWER_S)
