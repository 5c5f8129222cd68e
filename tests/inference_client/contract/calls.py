"""How the contract's tests talk to a server: with our own client, where it can say it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from easyrl.completion_check import Vocabulary, limits_of
from easyrl.config import SamplingConfig
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.responses import parse_generate_response
from easyrl.schema import Completion
from tests.inference_client.contract.served_models import EOS, true_logprobs
from tests.tiny_models import VOCAB_SIZE

GENERATE = "/inference/v1/generate"
GENERATED_TOKENS = "vllm:generation_tokens_total"
RUNNING_REQUESTS = "vllm:num_requests_running"
VOCABULARY = Vocabulary(VOCAB_SIZE, frozenset({EOS}))
PROMPT = (5, 17, 33, 2, 61, 40, 12)
LOGPROB_TOLERANCE = 1e-3  # fp32 on both sides; other kernels sum in another order


async def sample(
    client: EndpointClient,
    prompt: Sequence[int] = PROMPT,
    *,
    seed: int = 1,
    n: int = 1,
    fits: bool = True,
    **sampling: Any,
) -> list[Completion]:
    """``n`` responses as the trainer would get them; ``fits``: the context has room for them."""
    settings = SamplingConfig(**sampling)
    body = await client.generate(prompt, settings, seed, n)
    limits = limits_of(settings, VOCABULARY, told_length=fits)
    return parse_generate_response(body, client.url, len(prompt), limits)


def long_response(length: int) -> dict[str, Any]:
    """Settings of a response of exactly ``length`` tokens."""
    return {"max_tokens": length, "ignore_eos": True}


def logprob_error(
    model: Any, prompt: Sequence[int], completion: Completion, temperature: float = 1.0
) -> float:
    """Largest |Δ log-prob| of a response against ``model``'s own, nats."""
    expected = true_logprobs(model, prompt, completion.token_ids.tolist(), temperature)
    return float(np.abs(completion.logprobs - expected).max())


def versions(completion: Completion) -> list[str]:
    """The versions stamped on a response, in the order of its tokens."""
    return [span.version for span in completion.version_spans]


async def gauge(http: aiohttp.ClientSession, url: str, name: str) -> float:
    """A figure of ``/metrics``, over all its labels."""
    (value,) = await gauges(http, url, name)
    return value


async def gauges(http: aiohttp.ClientSession, url: str, *names: str) -> list[float]:
    """Several at one time."""
    async with http.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    values = []
    for name in names:
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert found, f"{name} is not among {lines}"
        values.append(sum(float(line.rsplit(" ", 1)[1]) for line in found))
    return values


async def in_flight(
    client: EndpointClient, http: aiohttp.ClientSession, count: int, length: int
) -> list[asyncio.Task[list[Completion]]]:
    """``count`` responses of ``length`` tokens, seeded from 0, that the server is in the midst of.

    Tried again if a busy machine shows it too late.
    """
    for _ in range(10):
        before = await gauge(http, client.url, GENERATED_TOKENS)
        tasks = [
            asyncio.create_task(sample(client, seed=seed, **long_response(length)))
            for seed in range(count)
        ]
        async with asyncio.timeout(30):
            while not any(task.done() for task in tasks):
                names = RUNNING_REQUESTS, GENERATED_TOKENS
                running, generated = await gauges(http, client.url, *names)
                if running >= count and generated >= before + 2 * count:
                    break
        if not any(task.done() for task in tasks):
            return tasks
        await asyncio.gather(*tasks)
    raise AssertionError(f"{length} tokens are too few to be seen in flight on this machine")
