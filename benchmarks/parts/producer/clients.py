"""What others would write: the ``openai`` async client, and ``requests`` in a pool of threads.

Both ask ``/v1/completions`` for the same responses as EasyRL does, one request per sample, and
make arrays of token ids and log-probabilities. They score nothing, group nothing, check nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.parts.producer.load import MAX_INFLIGHT, Load

NUM_THREADS = 128


def run_openai(load: Load, urls: Sequence[str]) -> int:
    """All groups at once, each request waiting for its place. Returns the number of tokens."""
    return asyncio.run(_run_openai(load, urls))


async def _run_openai(load: Load, urls: Sequence[str]) -> int:
    import openai

    limit = asyncio.Semaphore(MAX_INFLIGHT * len(urls))
    # its default closes all idle connections but 100
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)
    connections = limits(max_connections=MAX_INFLIGHT, max_keepalive_connections=MAX_INFLIGHT)
    clients = [
        openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(limits=connections),
        )
        for url in urls
    ]

    async def sample(prompt: list[int], index: int, number: int) -> int:
        async with limit:
            answer = await clients[(index + number) % len(clients)].completions.create(
                model="scripted",
                prompt=prompt,
                max_tokens=2 * load.num_tokens,
                temperature=1.0,
                seed=load.seed(index, number),
                logprobs=0,
                extra_body={"return_token_ids": True},
            )
        choice = answer.choices[0]
        token_ids = np.array(choice.token_ids, dtype=np.int32)  # type: ignore[attr-defined]
        assert choice.logprobs is not None
        logprobs = np.array(choice.logprobs.token_logprobs, dtype=np.float32)
        assert len(token_ids) == len(logprobs)
        return len(token_ids)

    async def group(index: int) -> int:
        prompt = load.prompt(index).tolist()
        samples = [sample(prompt, index, number) for number in range(load.num_samples)]
        return sum(await asyncio.gather(*samples))

    total = sum(await asyncio.gather(*[group(index) for index in range(load.num_groups)]))
    for client in clients:
        await client.close()
    return total


def run_requests(load: Load, urls: Sequence[str]) -> int:
    """``NUM_THREADS`` threads with a session each. Returns the number of tokens."""
    import requests

    local = threading.local()

    def sample(task: tuple[int, int]) -> int:
        if not hasattr(local, "session"):
            local.session = requests.Session()
        index, number = task
        body = {
            "model": "scripted",
            "prompt": load.prompt(index).tolist(),
            "max_tokens": 2 * load.num_tokens,
            "temperature": 1.0,
            "seed": load.seed(index, number),
            "logprobs": 0,
            "return_token_ids": True,
        }
        url = urls[(index + number) % len(urls)]
        answer = local.session.post(f"{url}/v1/completions", json=body, timeout=600)
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        token_ids = np.array(choice["token_ids"], dtype=np.int32)
        logprobs = np.array(choice["logprobs"]["token_logprobs"], dtype=np.float32)
        assert len(token_ids) == len(logprobs)
        return len(token_ids)

    tasks = [(i, n) for i in range(load.num_groups) for n in range(load.num_samples)]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return sum(threads.map(sample, tasks))
