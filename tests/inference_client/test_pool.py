"""The pool: spread, order, limits, retries, versions, recovery. The tests hold the gates."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from easyrl.config import InferenceConfig, SamplingConfig
from easyrl.inference_client.errors import (
    AttemptsFailed,
    EndpointUnavailable,
    MalformedResponse,
    NoEndpointError,
    PromptTooLong,
    RequestRejected,
)
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.inference_client.pool.group_assignment import ExpectedLengths
from tests.inference_client.fake_endpoint import (
    FakeEndpoint,
    answer,
    break_off,
    hang,
    status,
    truncate,
)
from tests.inference_client.pool_cases import (
    PROMPT,
    SAMPLING,
    V1,
    V2,
    ask,
    open_all,
    pool_of,
    sample,
    seeds,
    servers,
    until,
)
from tests.inference_client.raw_server import RawServer, http

# -- spread, limits, order ---------------------------------------------------------------


async def test_requests_in_flight_are_spread_evenly():
    group = servers(4, gated=True)
    async with pool_of(*group) as pool:
        tasks = [ask(pool, seed) for seed in range(42)]
        for server in group:
            await server.until(lambda server=server: len(server.requests) >= 10)
        # Equal requests, least work first: 42 over 4 is 11, 11, 10, 10.
        assert sorted(endpoint.num_inflight for endpoint in pool.endpoints) == [10, 10, 11, 11]
        await open_all(tasks, *group)


async def test_work_counts_tokens_not_requests():
    first, second = servers(2, gated=True)
    async with pool_of(first, second) as pool:
        long = asyncio.ensure_future(sample(pool, PROMPT, SamplingConfig(max_tokens=1000), 0))
        await first.until(lambda: len(first.requests) == 1)
        tasks = [long, *[ask(pool, seed) for seed in range(1, 9)]]
        await second.until(lambda: len(second.requests) == 8)
        assert len(first.requests) == 1
        await open_all(tasks, first, second)


async def test_a_slow_endpoint_gets_less():
    slow, fast = servers(2, gated=True)
    fast.gated = False
    async with pool_of(slow, fast, max_inflight=2) as pool:
        tasks = [ask(pool, seed) for seed in range(20)]
        await fast.until(lambda: len(fast.requests) == 18)
        assert len(slow.requests) == 2
        await open_all(tasks, slow)


@pytest.mark.parametrize("num_shares, limit", [(1, 6), (2, 3), (100, 1)])
async def test_max_inflight_is_shared_and_never_exceeded(num_shares, limit):
    group = servers(2, gated=True)
    async with pool_of(*group, max_inflight=6, num_shares=num_shares) as pool:
        tasks = [ask(pool, seed) for seed in range(60)]
        for server in group:
            await server.until(lambda server=server: server.num_open == limit)
        await open_all(tasks, *group)
        assert [task.result().token_ids[0] for task in tasks] == list(range(60))
    assert [server.max_open for server in group] == [limit, limit]


async def test_waiting_requests_are_served_in_the_order_of_asking():
    (server,) = servers(1)
    async with pool_of(server, max_inflight=1) as pool:
        await asyncio.gather(*[ask(pool, seed) for seed in range(30)])
        assert seeds(server) == list(range(30))


async def test_groups_of_an_earlier_update_go_first_however_long():
    (server,) = servers(1)
    lengths = ExpectedLengths(max_tokens=8)
    lengths.saw(0, 8)
    lengths.saw(1, 1)

    async def send(pool: EndpointPool, index: int, priority: int) -> None:
        async with pool.group(3, lengths.of(index), V1, num_samples=2, priority=priority) as group:
            for i in range(2):
                seed = 100 * priority + 10 * index + i
                await pool.generate(PROMPT, SAMPLING, seed, group)

    async with pool_of(server, max_inflight=2) as pool:
        kinds = [(index, priority) for priority in (1, 0) for index in (0, 1)]
        await asyncio.gather(*[send(pool, *kind) for kind in kinds])
    assert seeds(server) == [10, 11, 0, 1, 110, 111, 100, 101]


async def test_a_retry_goes_before_younger_requests():
    (server,) = servers(1, gated=True)
    server.faults.append(status(503, "busy"))
    async with pool_of(server, max_inflight=1) as pool:
        tasks = [ask(pool, seed) for seed in range(3)]
        await open_all(tasks, server)
        assert seeds(server) == [0, 0, 1, 2]


async def test_a_request_that_avoids_an_endpoint_does_not_block_those_behind_it():
    first, second = servers(2, gated=True)
    first.faults.append(status(500, "broken once"))
    async with pool_of(first, second, max_inflight=1) as pool:
        retried, running, young = ask(pool, 0), ask(pool, 1), ask(pool, 2)
        await second.until(lambda: len(second.requests) == 1)
        first.gates[0].set()  # 0 fails and has to wait for the second endpoint, which is full
        await first.until(lambda: len(first.requests) == 2)
        assert seeds(first) == [0, 2] and seeds(second) == [1]
        await open_all([retried, running, young], first, second)
        assert (await retried).endpoint == second.url


# -- retries -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        status(500, "EngineCore died"),
        status(503, "overloaded"),
        status(429, "slow down"),
        truncate,
        break_off,
        hang,
        answer(finish_reason="abort"),
        answer(logprobs=None),
    ],
)
async def test_a_failed_request_goes_elsewhere_with_the_same_seed(fault):
    bad, good = servers(2)
    bad.always = fault
    async with pool_of(bad, good, progress_timeout_s=0.2, back_off_s=30) as pool:
        completion = await ask(pool, 41)
        assert completion.endpoint == good.url
        assert seeds(bad) == [41] and seeds(good) == [41]
        assert pool.num_retries == 1
        assert [endpoint.num_requests for endpoint in pool.endpoints] == [1, 1]
        assert [endpoint.num_failures for endpoint in pool.endpoints] == [1, 0]
        assert pool.endpoints[0].down is not None
        await asyncio.gather(*[ask(pool, seed) for seed in range(5)])
        assert len(bad.requests) == 1  # set aside


async def test_progress_elsewhere_on_the_endpoint_extends_the_time():
    """A response may take longer than the limit as long as the endpoint answers others."""
    (server,) = servers(1, gated=True)
    async with pool_of(server, progress_timeout_s=0.4) as pool:
        slow = ask(pool, 0)
        await server.until(lambda: len(server.gates) == 1)
        start = asyncio.get_running_loop().time()
        seed = 1
        while asyncio.get_running_loop().time() - start < 0.8:
            other = ask(pool, seed)
            await server.until(lambda n=seed: len(server.gates) == n + 1)
            server.gates[seed].set()
            await other
            seed += 1
        server.gates[0].set()
        assert (await slow).token_ids[0] == 0 and pool.num_retries == 0


async def test_a_single_endpoint_is_tried_again_after_its_back_off():
    (server,) = servers(1)
    server.faults.extend([status(500, "a"), truncate])
    async with pool_of(server) as pool:
        assert (await ask(pool, 3)).token_ids[0] == 3
        assert seeds(server) == [3, 3, 3]


async def test_attempts_are_limited_and_listed():
    first, second = servers(2)
    first.always = second.always = status(500, "no memory")
    async with pool_of(first, second, max_retries=2) as pool:
        with pytest.raises(AttemptsFailed, match="max_retries") as caught:
            await ask(pool, 0)
    assert len(first.requests) + len(second.requests) == 3
    assert str(caught.value).count("500 Internal Server Error: no memory") == 3
    assert first.url in str(caught.value) and second.url in str(caught.value)


# -- versions ----------------------------------------------------------------------------


async def test_only_endpoints_that_confirmed_the_version_are_asked():
    old, new = FakeEndpoint(version=V1), FakeEndpoint(version=V2)
    async with pool_of(old, new) as pool:
        completions = await asyncio.gather(*[ask(pool, seed, V2) for seed in range(10)])
        assert len(new.requests) == 10 and not old.requests
        assert {span.version for c in completions for span in c.version_spans} == {V2}
        await asyncio.gather(*[ask(pool, seed, None) for seed in range(10)])
        assert len(old.requests) == 5


async def test_a_response_of_another_version_is_never_returned():
    liar, honest = servers(2)
    mixed = [{"version": V1, "start": 0, "end": 2}, {"version": "default", "start": 2, "end": 3}]
    liar.always = answer(weight_versions=mixed)
    async with pool_of(liar, honest) as pool:
        completions = await asyncio.gather(*[ask(pool, seed) for seed in range(8)])
        assert {completion.endpoint for completion in completions} == {honest.url}
        assert [completion.token_ids[0] for completion in completions] == list(range(8))
        endpoint = pool.endpoints[0]
        assert endpoint.confirmed_version is None and "default" in endpoint.lost_confirmation
        assert "has confirmed no version" in endpoint.status(V1)


async def test_another_run_that_takes_an_endpoint_is_named():
    taken, ours = servers(2)
    spans = [{"version": V1, "start": 0, "end": 2}, {"version": "zoo:0:1", "start": 2, "end": 3}]
    taken.always = answer(weight_versions=spans)
    async with pool_of(taken, ours) as pool:
        await asyncio.gather(*[ask(pool, seed) for seed in range(8)])
        assert "another run (zoo) has given it weights" in pool.endpoints[0].status(V1)


async def test_withdrawn_confirmations_end_the_waiting():
    (server,) = servers(1, gated=True)
    async with pool_of(server, max_inflight=1) as pool:
        running, waiting = ask(pool, 0), ask(pool, 1)
        await server.until(lambda: len(server.requests) == 1)
        pool.withdraw_confirmations()
        with pytest.raises(NoEndpointError, match="has confirmed no version, not run:0:1"):
            await waiting
        await open_all([running], server)


async def test_updates_have_a_time_limit_of_their_own(monkeypatch):
    async def never(self: FakeEndpoint, request: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(FakeEndpoint, "_control", never)
    (server,) = servers(1)
    async with pool_of(server, update_timeout_s=0.1) as pool:
        with pytest.raises(EndpointUnavailable, match=r"update_weights .* within 0.1 s"):
            await pool.endpoints[0].client.update_weights({})


# -- cancelling, giving up, starting -----------------------------------------------------


async def test_cancelling_closes_the_connection_and_frees_the_place():
    (server,) = servers(1, gated=True)
    async with pool_of(server, max_inflight=2) as pool:
        tasks = [ask(pool, seed) for seed in range(5)]
        await server.until(lambda: len(server.requests) == 2)
        tasks[0].cancel()  # in flight
        tasks[2].cancel()  # in line
        await server.until(lambda: server.num_disconnected == 1 and len(server.requests) == 3)
        assert seeds(server)[2] == 3
        await open_all([tasks[1], tasks[3], tasks[4]], server)
        assert pool.endpoints[0].num_inflight == 0 and pool.endpoints[0].outstanding_tokens == 0


async def test_cancelling_in_the_moment_a_place_is_given_frees_it():
    (server,) = servers(1)
    async with pool_of(server, max_inflight=1) as pool:
        endpoint = pool.endpoints[0]
        endpoint.begin(1)  # the only place is taken
        waiting = ask(pool, 0)
        await asyncio.sleep(0)
        pool._dispatcher.release(
            endpoint, 1
        )  # the place is given, the waiting task has not run yet
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert endpoint.num_inflight == 0
        assert (await ask(pool, 1)).token_ids[0] == 1


async def test_start_needs_one_and_takes_in_the_others_when_they_come():
    up, sick = servers(2)
    sick.healthy = False
    async with pool_of(up, sick, confirmed=False) as pool:
        await pool.wait_until_healthy(grace_s=0.2)
        first, second = pool.endpoints
        assert first.is_up and "GET /health answered 503" in second.status(None)
        sick.healthy = True
        await asyncio.gather(*[ask(pool, seed, None) for seed in range(4)])
        while not second.is_up:
            await asyncio.sleep(0.01)
        assert [endpoint.served.max_model_len for endpoint in pool.endpoints] == [512, 512]


async def test_start_names_what_each_answered_when_none_comes():
    group = servers(2)
    group[0].healthy = group[1].healthy = False
    async with pool_of(*group, confirmed=False, startup_timeout_s=0.3) as pool:
        with pytest.raises(NoEndpointError, match="startup_timeout_s") as caught:
            await pool.wait_until_healthy()
    assert all(f"{server.url}: down: GET /health answered 503" in str(caught.value)
               for server in group)  # fmt: skip


async def test_nobody_is_waited_for_who_has_been_given_up():
    first, second = servers(2)
    first.healthy = second.healthy = False
    async with pool_of(first, second, confirmed=False) as pool:
        gone = {first.url: "ended"}
        waiting = asyncio.create_task(pool.wait_until_healthy(given_up=lambda: gone))
        await asyncio.sleep(0.3)
        assert not waiting.done()  # the other one may come
        gone[second.url] = "ended"
        with pytest.raises(NoEndpointError, match="none will be:") as caught:
            await asyncio.wait_for(waiting, 10)
    assert first.url in str(caught.value)


async def test_a_wrong_key_is_told_at_once_and_a_missing_one_before_the_start(monkeypatch):
    (server,) = servers(1, api_key="secret")
    async with pool_of(server, confirmed=False) as pool:
        with pytest.raises(RequestRejected, match="401.*inference.api_key_env"):
            await pool.wait_until_healthy()
    monkeypatch.delenv("EASYRL_TEST_KEY", raising=False)
    config = InferenceConfig(endpoints=["http://a"], api_key_env="EASYRL_TEST_KEY")
    with pytest.raises(ValueError, match=r"inference\.api_key_env: .* EASYRL_TEST_KEY is not set"):
        EndpointPool(config, never_fetch)
    monkeypatch.setenv("EASYRL_TEST_KEY", "secret")
    async with pool_of(server, confirmed=False, api_key_env="EASYRL_TEST_KEY") as pool:
        await pool.wait_until_healthy()
        assert pool.endpoints[0].served.name == "fake"


@pytest.mark.parametrize(
    "key", ["sk-MARKED\n", "sk-MA\rRKED", " sk-MARKED", "sk-MARKED\x7f", "sk-MARKED-\u00e9", "\ta"]
)
def test_a_key_that_no_header_can_carry_is_told_before_the_start(monkeypatch, key):
    monkeypatch.setenv("EASYRL_TEST_KEY", key)
    own = {"url": "http://a", "api_key_env": "EASYRL_TEST_KEY"}
    for config, place in (
        (InferenceConfig(endpoints=["http://a"], api_key_env="EASYRL_TEST_KEY"), "api_key_env"),
        (InferenceConfig(endpoints=[own]), r"endpoints\[0\].api_key_env"),
    ):
        with pytest.raises(ValueError, match=rf"inference\.{place}: .* EASYRL_TEST_KEY") as caught:
            EndpointPool(config, never_fetch)
        assert "MA" not in str(caught.value) and "without" in str(caught.value)


async def test_a_url_that_redirects_is_told_at_once():
    login = RawServer()
    login.answer = http(b"", "302 Found", "Location: https://login.example/")
    async with pool_of(login, confirmed=False) as pool:
        with pytest.raises(MalformedResponse, match="302.*https://login.example/"):
            await asyncio.wait_for(pool.wait_until_healthy(), 5)


async def test_one_that_refuses_us_costs_the_start_nothing_beside_another(caplog):
    refuses, booting, up = FakeEndpoint(api_key="secret"), *servers(2)
    booting.healthy = up.healthy = False
    async with pool_of(refuses, booting, up, confirmed=False) as pool:
        waiting = asyncio.create_task(pool.wait_until_healthy(grace_s=0.2))
        while pool.endpoints[0].refused is None:
            await asyncio.sleep(0.01)
        up.healthy = True  # the one that refuses has been seen before
        await waiting
        assert [endpoint.is_up for endpoint in pool.endpoints] == [False, False, True]
    assert re.search(f"going on without.*\n.*{refuses.url}: down: .*401", caplog.text)


async def test_each_endpoint_is_sent_its_own_key_on_every_route(monkeypatch):
    monkeypatch.setenv("EASYRL_TEST_KEY", "of all")
    monkeypatch.setenv("EASYRL_TEST_OWN_KEY", "of one")
    async with FakeEndpoint(api_key="of all") as first, FakeEndpoint(api_key="of one") as second:
        config = InferenceConfig(
            endpoints=[first.url, {"url": second.url + "/", "api_key_env": "EASYRL_TEST_OWN_KEY"}],
            api_key_env="EASYRL_TEST_KEY",
            health_interval_s=0.05,
        )
        pool = EndpointPool(config, never_fetch)
        await pool.start()
        await until(lambda: all(endpoint.is_up for endpoint in pool.endpoints))
        await pool.endpoints[1].client.pause("wait")
        await pool.close()
        assert first.keys == {"Bearer of all"} and second.keys == {"Bearer of one"}


async def test_an_endpoint_that_is_added_names_its_own_key(monkeypatch):
    (old,) = servers(1)
    monkeypatch.delenv("EASYRL_TEST_KEY", raising=False)
    async with FakeEndpoint(api_key="its own") as new, pool_of(old) as pool:
        with pytest.raises(ValueError, match="--api-key-env: .* EASYRL_TEST_KEY is not set"):
            pool.add(new.url, "EASYRL_TEST_KEY")
        assert len(pool.endpoints) == 1
        monkeypatch.setenv("EASYRL_TEST_KEY", "its own")
        pool.add(new.url, "EASYRL_TEST_KEY")
        await until(lambda: pool.endpoints[1].is_up)
        assert new.keys == {"Bearer its own"} and old.keys == {None}


async def never_fetch(*_: Any) -> Any:
    raise AssertionError("not to be called")


async def test_idle_time_counts_only_what_has_nothing_in_flight(monkeypatch):
    clock = 100.0
    monkeypatch.setattr("easyrl.inference_client.pool.endpoint.time.monotonic", lambda: clock)
    busy, idle = Endpoint(FakeClient(), 8), Endpoint(FakeClient(), 8)
    clock = 103.0
    busy.begin(1)
    busy.begin(1)
    clock = 110.0
    busy.end(1)
    assert busy.idle_s() == 3.0 and idle.idle_s() == 10.0
    busy.end(1)
    clock = 112.0
    assert busy.idle_s() == 5.0 and idle.idle_s() == 12.0


async def test_idle_time_never_falls_when_endpoints_come_and_go(monkeypatch):
    clock = 0.0
    monkeypatch.setattr("easyrl.inference_client.pool.endpoint.time.monotonic", lambda: clock)
    pool = EndpointPool(InferenceConfig(endpoints=["http://a"]), never_fetch)
    first = Endpoint(FakeClient(), 8)
    pool.endpoints = [first]
    clock = 10.0
    assert pool.idle_s() == 10.0
    second = Endpoint(FakeClient(), 8)
    second.begin(1)
    clock = 14.0
    pool.endpoints = [first, second]
    assert pool.idle_s() == 12.0  # 4 s and none
    pool.endpoints = [second]
    assert pool.idle_s() == 12.0
    pool.endpoints = []
    assert pool.idle_s() == 12.0


class FakeClient:
    url = "http://a"


# -- the context's end ---------------------------------------------------------------------


async def test_a_request_asks_for_what_the_largest_context_has_room_for():
    small, large = servers(2, gated=True)
    small.max_model_len, large.max_model_len = 5, 10
    async with pool_of(small, large) as pool:
        await until(lambda: all(endpoint.context for endpoint in pool.endpoints))
        tasks = [
            asyncio.ensure_future(sample(pool, PROMPT, SamplingConfig(max_tokens=n), n))
            for n in (7, 8, 500, 6)
        ]
        await large.until(lambda: len(large.requests) == 4)  # the small one has room for none
        sent = [request["sampling_params"] for request in large.requests]
        assert {params["seed"]: params["max_tokens"] for params in sent} == {
            7: 7, 8: 7, 500: 7, 6: 6,
        }  # fmt: skip
        await open_all(tasks, small, large)


async def test_a_prompt_without_room_for_a_token_is_refused_before_it_is_sent():
    (server,) = servers(1, max_model_len=3)
    async with pool_of(server) as pool:
        await until(lambda: pool.endpoints[0].context == 3)
        with pytest.raises(PromptTooLong, match="context length is 3 tokens, .* a prompt of 3 "):
            await ask(pool, 0)
        assert (await sample(pool, PROMPT[:2], SAMPLING, 1)).token_ids[0] == 1
        few = SamplingConfig(max_tokens=8, min_tokens=2)
        with pytest.raises(PromptTooLong):
            await sample(pool, PROMPT[:2], few, 2)
        assert seeds(server) == [1]


# -- devices -----------------------------------------------------------------------------


@pytest.mark.parametrize(("configured", "expected"), [(None, 4 + 1), (8, 16)])
async def test_devices_are_as_configured_or_as_the_servers_say(configured, expected):
    """A tensor-parallel server of four counts four; one that does not tell counts one."""
    told, silent = servers(2)
    told.world_size = 4
    async with pool_of(told, silent, devices_per_endpoint=configured) as pool:
        await until(lambda: all(is_asked(server) for server in (told, silent)))
        await until(lambda: all(endpoint.served for endpoint in pool.endpoints))
        await until(lambda: pool.num_devices == expected)
        pool.remove(silent.url)
        assert pool.num_devices == (4 if configured is None else 8)


def is_asked(server):
    return ("/get_world_size", None) in server.calls


@pytest.mark.parametrize("said", [0, -1, 10**9, "4", None, 2.5])
async def test_a_number_of_devices_that_is_none_counts_as_not_told(said):
    (server,) = servers(1)
    server.world_size = said
    async with pool_of(server) as pool:
        await until(lambda: is_asked(server) and pool.endpoints[0].served is not None)
        assert pool.num_devices == 1
