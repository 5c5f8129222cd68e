"""Fetchers: what they bring, what failures are called here, and that nothing is lost or left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import psutil
import pytest
from aiohttp import web
from fake_endpoint import FakeEndpoint, answer, break_off, hang, status, truncate

from easyrl.config import SamplingConfig
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.errors import (
    EndpointUnavailable,
    MalformedResponse,
    PromptRejected,
    RequestRejected,
)
from easyrl.inference_client.fetching import fetcher_pool
from easyrl.inference_client.fetching.fetcher_pool import FetcherDied, FetcherPool
from easyrl.inference_client.fetching.fetcher_process import local_fetch
from easyrl.runtime.workers import supervised_child
from easyrl.schema import VersionSpan

PROMPT = np.array([5, 6, 7], dtype=np.int32)
SAMPLING = SamplingConfig(max_tokens=9, temperature=0.7, stop_token_ids=[3])


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeEndpoint]:
    async with FakeEndpoint() as server:
        yield server


@pytest.fixture
async def fetch() -> AsyncIterator[FetcherPool]:
    fetchers = FetcherPool(1)
    await fetchers.start()
    yield fetchers
    await fetchers.close()
    assert not fetcher_processes()


def fetcher_processes() -> list[psutil.Process]:
    """Children of this process that are fetchers; other tests' servers may be there too."""
    children = psutil.Process().children()
    return [child for child in children if "fetcher_process" in " ".join(child.cmdline())]


def fetcher() -> psutil.Process:
    """The one fetcher process."""
    (child,) = fetcher_processes()
    return child


async def test_a_fetcher_brings_what_a_local_request_brings(endpoint, fetch):
    endpoint.num_tokens = 1000
    endpoint.version = "r:0:4"
    async with aiohttp.ClientSession() as session:
        expected = await local_fetch(session)(endpoint.url, PROMPT, SAMPLING, 11)
    completion = await fetch(endpoint.url, PROMPT, SAMPLING, 11)
    assert endpoint.requests[0] == endpoint.requests[1]
    assert completion.token_ids.tolist() == list(range(11, 1011)) == expected.token_ids.tolist()
    assert completion.token_ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
    np.testing.assert_array_equal(completion.logprobs, expected.logprobs)
    np.testing.assert_array_equal(completion.loss_mask, expected.loss_mask)
    assert completion.finish_reason == "stop" and completion.endpoint == endpoint.url
    assert completion.version_spans == (VersionSpan("r:0:4", 0, 1000),)
    completion.token_ids[0] = 1  # torch warns about arrays that it could not write to


async def test_many_requests_come_back_to_their_callers(endpoint):
    endpoint.gated = True  # all have to be in flight at once
    fetchers = FetcherPool(2)
    await fetchers.start()
    requests = [
        asyncio.ensure_future(fetchers(endpoint.url, PROMPT, SAMPLING, seed)) for seed in range(300)
    ]
    await endpoint.until(lambda: endpoint.num_open == 300)
    for gate in endpoint.gates:
        gate.set()
    completions = await asyncio.gather(*requests)
    assert [completion.token_ids[0] for completion in completions] == list(range(300))
    await fetchers.close()


@pytest.mark.parametrize(
    "fault, kind, said",
    [
        (status(400, "Token id 5000 is out of vocabulary"), PromptRejected, "400 .*out of vocab"),
        (status(401, "who are you"), RequestRejected, "401 .*who are you"),
        (status(503, "overloaded"), EndpointUnavailable, "503 .*overloaded"),
        (break_off, EndpointUnavailable, "failed: ClientPayloadError"),
        (truncate, MalformedResponse, "truncated"),
        (answer(finish_reason="abort"), MalformedResponse, "'abort'"),
    ],
)
async def test_failures_arrive_as_what_they_are(endpoint, fetch, fault, kind, said):
    endpoint.faults.append(fault)
    with pytest.raises(kind, match=said) as caught:
        await fetch(endpoint.url, PROMPT, SAMPLING, 0)
    assert type(caught.value) is kind and caught.value.url == endpoint.url
    assert (await fetch(endpoint.url, PROMPT, SAMPLING, 4)).token_ids[0] == 4


async def test_no_server_is_unavailable(endpoint, fetch):
    await endpoint.stop()
    with pytest.raises(EndpointUnavailable, match="ClientConnectorError"):
        await fetch(endpoint.url, PROMPT, SAMPLING, 0)


async def test_what_the_user_has_to_change_is_a_value_error(endpoint, fetch):
    endpoint.has_tokenizer = False
    with pytest.raises(ValueError, match=r"rollout\.stop .* stop_token_ids"):
        await fetch(endpoint.url, PROMPT, SamplingConfig(stop=["END"]), 0)


async def test_the_key_is_sent(endpoint):
    endpoint.api_key = "secret"
    fetchers = FetcherPool(1, ApiKeys(default="secret"))
    await fetchers.start()
    await fetchers(endpoint.url, PROMPT, SAMPLING, 0)
    await fetchers.close()


async def test_each_endpoint_is_sent_its_own_key_and_no_other(endpoint):
    async with FakeEndpoint() as other:
        fetchers = FetcherPool(1, ApiKeys({endpoint.url: "its own"}, default="all others'"))
        await fetchers.start()
        for url in (endpoint.url, other.url, endpoint.url):
            await fetchers(url, PROMPT, SAMPLING, 0)
        await fetchers.close()
        assert endpoint.keys == {"Bearer its own"} and other.keys == {"Bearer all others'"}


async def test_cancelling_closes_the_connection(endpoint, fetch):
    endpoint.faults.append(hang)
    request = asyncio.ensure_future(fetch(endpoint.url, PROMPT, SAMPLING, 0))
    await endpoint.until(lambda: endpoint.num_open == 1)
    request.cancel()
    await endpoint.until(lambda: endpoint.num_disconnected == 1)
    with pytest.raises(asyncio.CancelledError):
        await request
    assert (await fetch(endpoint.url, PROMPT, SAMPLING, 4)).token_ids[0] == 4


async def test_requests_of_a_killed_fetcher_are_sent_again_with_their_seeds(endpoint, fetch):
    endpoint.gated = True
    requests = [
        asyncio.ensure_future(fetch(endpoint.url, PROMPT, SAMPLING, seed)) for seed in (7, 8)
    ]
    await endpoint.until(lambda: endpoint.num_open == 2)
    killed = fetcher()
    killed.kill()
    await endpoint.until(lambda: len(endpoint.requests) == 4)
    for gate in endpoint.gates:
        gate.set()
    completions = await asyncio.gather(*requests)
    assert [completion.token_ids[0] for completion in completions] == [7, 8]
    assert fetcher().pid != killed.pid


async def test_a_fetcher_that_died_while_idle_fails_no_request(endpoint, fetch):
    await fetch(endpoint.url, PROMPT, SAMPLING, 0)
    fetcher().kill()
    await asyncio.sleep(0.1)  # the death is noticed before the request; the test above has it after
    assert (await fetch(endpoint.url, PROMPT, SAMPLING, 4)).token_ids[0] == 4


async def test_a_request_that_kills_its_fetchers_is_not_repeated_for_ever(endpoint, fetch):
    async def kill(server: FakeEndpoint, request: web.Request, body: dict) -> web.StreamResponse:
        fetcher().kill()
        return await hang(server, request, body)

    endpoint.always = kill
    with pytest.raises(FetcherDied, match=f"3 fetcher .*{endpoint.url}; the last one: SIGKILL"):
        await fetch(endpoint.url, PROMPT, SAMPLING, 0)
    endpoint.always = None
    assert (await fetch(endpoint.url, PROMPT, SAMPLING, 4)).token_ids[0] == 4


async def test_a_fetcher_that_is_stopped_is_replaced(endpoint, fetch, monkeypatch, caplog):
    monkeypatch.setattr(fetcher_pool, "MAX_SILENT_BEATS", 2)
    await fetch(endpoint.url, PROMPT, SAMPLING, 0)
    stopped = fetcher()
    stopped.suspend()
    completion = await asyncio.wait_for(fetch(endpoint.url, PROMPT, SAMPLING, 7), 20)
    assert completion.token_ids[0] == 7
    assert fetcher().pid != stopped.pid
    assert "a fetcher process ended: silent for 2 s, and killed; 1 requests wait" in caplog.text


async def test_time_in_which_this_process_stands_still_is_not_the_fetchers_silence(
    endpoint, fetch, monkeypatch
):
    monkeypatch.setattr(fetcher_pool, "MAX_SILENT_BEATS", 2)
    await fetch(endpoint.url, PROMPT, SAMPLING, 0)
    first = fetcher()
    first.suspend()  # as a job that is stopped as a whole
    time.sleep(3.3)  # noqa: ASYNC251
    first.resume()
    await asyncio.sleep(1.2)  # a look
    assert (await fetch(endpoint.url, PROMPT, SAMPLING, 7)).token_ids[0] == 7
    assert fetcher().pid == first.pid


async def test_requests_fail_when_no_fetcher_can_be_started(endpoint, fetch, monkeypatch):
    def break_down(*_: object) -> None:
        raise ValueError("no such thing")

    endpoint.faults.append(hang)
    request = asyncio.ensure_future(fetch(endpoint.url, PROMPT, SAMPLING, 0))
    await endpoint.until(lambda: endpoint.num_open == 1)
    with monkeypatch.context() as broken:
        broken.setattr(supervised_child, "start_child", break_down)
        fetcher().kill()
        with pytest.raises(FetcherDied, match="can be started: ValueError: no such thing"):
            await asyncio.wait_for(request, 20)
    completion = await asyncio.wait_for(fetch(endpoint.url, PROMPT, SAMPLING, 4), 20)
    assert completion.token_ids[0] == 4


async def test_close_cancels_what_waits(endpoint):
    fetchers = FetcherPool(2)
    with pytest.raises(RuntimeError, match="not running"):
        await fetchers(endpoint.url, PROMPT, SAMPLING, 0)
    await fetchers.start()
    endpoint.always = hang
    request = asyncio.ensure_future(fetchers(endpoint.url, PROMPT, SAMPLING, 0))
    await endpoint.until(lambda: endpoint.num_open == 1)
    await fetchers.close()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert not fetcher_processes()
    with pytest.raises(RuntimeError, match="not running"):
        await fetchers(endpoint.url, PROMPT, SAMPLING, 0)
    await fetchers.close()


PARENT = """
    import asyncio, sys, time
    from easyrl.inference_client.fetching.fetcher_pool import FetcherPool

    async def main():
        await FetcherPool(2).start()
        print("started", flush=True)
        await asyncio.sleep(1000)

    asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_fetchers_end_when_the_parent_is_killed():
    code = textwrap.dedent(PARENT)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"started\n"
        fetchers = psutil.Process(parent.pid).children()
        assert len(fetchers) == 2
        os.kill(parent.pid, signal.SIGKILL)
        end_s = time.monotonic() + 20
        while any(f.is_running() and f.status() != psutil.STATUS_ZOMBIE for f in fetchers):
            assert time.monotonic() < end_s, "fetchers outlive their parent"
            time.sleep(0.02)


def test_a_fetcher_imports_nothing_heavy():
    code = "import sys, easyrl.inference_client.fetching.fetcher_process; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    assert not {b"torch", b"transformers", b"deepspeed"} & set(modules.split())
