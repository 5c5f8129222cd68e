"""Fetchers: what they bring, what failures are called here, and that nothing is lost or left."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
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

from easyrl.config import SamplingConfig
from easyrl.inference_client.adapter_names import AdapterNames
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.errors import (
    EndpointUnavailable,
    MalformedResponse,
    PromptRejected,
    RequestRejected,
)
from easyrl.inference_client.fetching import fetcher as fetcher_module
from easyrl.inference_client.fetching import fetcher_process
from easyrl.inference_client.fetching.fetcher import FetcherDied
from easyrl.inference_client.fetching.fetcher_pool import FetcherPool
from easyrl.inference_client.fetching.fetcher_process import local_fetch
from easyrl.inference_client.fetching.messages import Send, decode_replies
from easyrl.runtime.frames import FrameSplitter
from easyrl.runtime.workers import reporting_child, supervised_child
from easyrl.schema import Completion, VersionSpan
from tests.inference_client.fake_endpoint import (
    FakeEndpoint,
    Fault,
    answer,
    break_off,
    hang,
    status,
    truncate,
)
from tests.inference_client.pool_cases import V1, ask, pool_of

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
    sampling = SAMPLING.model_copy(update={"max_tokens": 1000})
    async with aiohttp.ClientSession() as session:
        expected = await local_fetch(session)(endpoint.url, PROMPT, sampling, 11)
    completion = await fetch(endpoint.url, PROMPT, sampling, 11)
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


async def test_a_server_that_cannot_apply_stop_strings_has_refused(endpoint, fetch):
    endpoint.has_tokenizer = False
    with pytest.raises(PromptRejected, match=r"rollout\.stop .* stop_token_ids"):
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


async def kill(server: FakeEndpoint, request: web.Request, body: dict) -> web.StreamResponse:
    """Stands for an answer that ends the process which receives it."""
    for process in fetcher_processes():
        if request.transport.get_extra_info("peername")[1] in ports(process):
            process.kill()
    return await hang(server, request, body)


def ports(process: psutil.Process) -> list[int]:
    return [connection.laddr.port for connection in process.net_connections("tcp4")]


def killing(*killers: int) -> Fault:
    """Kills the fetchers of requests with these seeds."""

    async def fault(server: FakeEndpoint, request: web.Request, body: dict) -> web.StreamResponse:
        if body["sampling_params"]["seed"] in killers:
            return await kill(server, request, body)
        return web.Response(body=server.response(body))

    return fault


async def test_an_answer_that_kills_its_fetcher_is_its_endpoints_fault(endpoint, fetch):
    endpoint.always = kill
    with pytest.raises(MalformedResponse, match="its answer ended .* alone: SIGKILL") as caught:
        await fetch(endpoint.url, PROMPT, SAMPLING, 0)
    assert caught.value.url == endpoint.url
    endpoint.always = None
    assert (await fetch(endpoint.url, PROMPT, SAMPLING, 4)).token_ids[0] == 4


async def test_of_many_requests_in_flight_the_one_that_kills_is_found(endpoint, fetch, caplog):
    async with FakeEndpoint() as other:
        endpoint.always = killing(5)
        endpoint.gated = other.gated = True
        asked = [(endpoint, seed) for seed in range(12)] + [(other, seed) for seed in range(20, 24)]
        requests = {
            seed: asyncio.ensure_future(fetch(server.url, PROMPT, SAMPLING, seed))
            for server, seed in asked
        }
        await endpoint.until(lambda: endpoint.num_open == 12)
        await other.until(lambda: other.num_open == 4)
        endpoint.gated = other.gated = False  # innocents are answered when they are asked again
        seeds = [asked["sampling_params"]["seed"] for asked in endpoint.requests]
        endpoint.gates[seeds.index(5)].set()
        await asyncio.wait(requests.values(), timeout=60)
        with pytest.raises(MalformedResponse, match="its answer ended"):
            requests.pop(5).result()
        assert {seed: request.result().token_ids[0] for seed, request in requests.items()} == {
            seed: seed for seed in requests
        }
    assert caplog.text.count("a fetcher process ended") <= 1 + 1 + 4  # halves, not one by one


async def test_what_is_asked_after_a_death_does_not_wait_for_the_suspects(endpoint, fetch):
    endpoint.gated = True
    suspects = [
        asyncio.ensure_future(fetch(endpoint.url, PROMPT, SAMPLING, seed)) for seed in (7, 8)
    ]
    await endpoint.until(lambda: endpoint.num_open == 2)
    fetcher().kill()
    await endpoint.until(lambda: len(endpoint.requests) == 4)  # they are sent again
    endpoint.gated = False
    assert (await fetch(endpoint.url, PROMPT, SAMPLING, 4)).token_ids[0] == 4
    assert not any(request.done() for request in suspects)
    for gate in endpoint.gates:
        gate.set()
    assert [made.token_ids[0] for made in await asyncio.gather(*suspects)] == [7, 8]


async def test_a_suspect_that_is_cancelled_holds_nobody_up(endpoint, fetch):
    endpoint.gated = True
    first, second, third, fourth = suspects = [
        asyncio.ensure_future(fetch(endpoint.url, PROMPT, SAMPLING, seed)) for seed in range(4)
    ]
    for num_sent in (4, 8):  # together, together once more, then in halves
        await endpoint.until(lambda n=num_sent: len(endpoint.requests) == n)
        fetcher().kill()
    await endpoint.until(lambda: len(endpoint.requests) == 10)
    endpoint.gated = False
    first.cancel()  # is at the endpoint, with the second
    third.cancel()  # waits, with the fourth
    second.cancel()
    assert (await asyncio.wait_for(fourth, 20)).token_ids[0] == 3
    await endpoint.until(lambda: endpoint.num_open == 0)
    assert sum(suspect.cancelled() for suspect in suspects) == 3


async def test_an_endpoint_whose_answers_kill_costs_no_response(endpoint, fetch, caplog):
    """Through the pool: what was asked of it goes to the other one, with the same seeds."""
    good = FakeEndpoint(version=V1)
    bad = FakeEndpoint(version=V1, always=kill)
    async with pool_of(bad, good, fetch=fetch) as pool:
        made = await asyncio.wait_for(asyncio.gather(*(ask(pool, seed) for seed in range(8))), 60)
        assert [completion.token_ids[0] for completion in made] == list(range(8))
        assert {completion.endpoint for completion in made} == {good.url}
        assert pool.endpoints[0].num_failures > 0 and pool.endpoints[1].num_failures == 0
    assert caplog.text.count("alone: SIGKILL") < 6  # is told by two, not by each of its requests


async def test_a_fetcher_that_ends_before_it_serves_is_nobodys_fault(endpoint, monkeypatch):
    monkeypatch.setattr(fetcher_module, "ENTRY", "easyrl.no_such_module:main")
    fetchers = FetcherPool(1)
    await fetchers.start()
    with pytest.raises(FetcherDied, match="3 fetcher .*exit code 1"):
        await asyncio.wait_for(fetchers(endpoint.url, PROMPT, SAMPLING, 0), 60)
    await fetchers.close()


@pytest.mark.parametrize(
    "is_awaited, others, waits",
    [(True, True, False), (False, True, True), (False, False, False)],
    ids=["awaited", "others to come", "the last"],
)
async def test_a_reply_waits_for_others_that_are_to_come_unless_it_is_awaited(
    is_awaited, others, waits
):
    async def slow(endpoint: FakeEndpoint, request: web.Request, body: dict) -> web.StreamResponse:
        if body["sampling_params"]["seed"] == 99:
            return await hang(endpoint, request, body)
        await asyncio.sleep(1.0)
        return web.Response(body=endpoint.response(body), content_type="application/json")

    async with FakeEndpoint(version=V1, always=slow) as endpoint:
        fetchers = FetcherPool(1, is_awaited=is_awaited)
        await fetchers.start()
        other = None
        if others:
            other = asyncio.ensure_future(fetchers(endpoint.url, PROMPT, SAMPLING, 99))
        try:
            took_s = []
            for seed in range(4):
                start_s = time.monotonic()
                await fetchers(endpoint.url, PROMPT, SAMPLING, seed)
                took_s.append(time.monotonic() - start_s)
        finally:
            if other is not None:
                other.cancel()
            await fetchers.close()
    assert (min(took_s) - 1.0 >= 0.015) is waits, took_s


async def test_answers_beyond_the_fetchers_memory_are_their_endpoints_fault():
    async def fetch(url: str, *_: object) -> Completion:
        raise MemoryError

    ours, theirs = socket.socketpair()
    with ours:
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        process = fetcher_process._Fetcher(
            fetch, ApiKeys(), AdapterNames(), writer, None, 2**31, 0.0
        )
        process.obey(Send(3, "http://a", PROMPT.tobytes(), SAMPLING.model_dump_json().encode(), 0))
        frames, replies = FrameSplitter(), []
        ours.setblocking(False)
        while not replies:
            data = await asyncio.get_running_loop().sock_recv(ours, 2**16)
            replies = [r for payload in frames.feed(data) for r in decode_replies(payload)]
        writer.close()
    error = pickle.loads(replies[0].failure).exception()
    assert type(error) is EndpointUnavailable and error.url == "http://a"


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_memory_beyond_the_share_is_refused():
    code = """
        from easyrl.runtime.machine import limit_memory
        import os
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit_memory(2**29 / total)
        bytearray(2**28)
        try:
            bytearray(2**29)
        except MemoryError:
            print("refused")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"refused\n"


async def test_a_fetcher_that_is_stopped_is_replaced(endpoint, fetch, monkeypatch, caplog):
    monkeypatch.setattr(reporting_child, "MAX_SILENT_BEATS", 2)
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
    monkeypatch.setattr(reporting_child, "MAX_SILENT_BEATS", 2)
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
