"""Who is at fault when an endpoint refuses a prompt: the endpoint until another says the same."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from easyrl.config import SamplingConfig
from easyrl.inference_client.errors import (
    EndpointUnavailable,
    Outage,
    PromptRejected,
    PromptTooLong,
)
from tests.inference_client.fake_endpoint import FakeEndpoint, Fault, error_response, status
from tests.inference_client.pool_cases import (
    PROMPT,
    SAMPLING,
    V1,
    ask,
    open_all,
    pool_of,
    repairer,
    sample,
    seeds,
    servers,
    until,
)

OTHER = np.array([8, 9], dtype=np.int32)
TOO_MUCH = "too many images for this model"


def refuses(prompt: np.ndarray = PROMPT, code: int = 400) -> Fault:
    """Refuses one prompt and serves all others."""

    async def fault(endpoint: FakeEndpoint, request: web.Request, body: dict) -> web.StreamResponse:
        if body["token_ids"] == prompt.tolist():
            return error_response(code, TOO_MUCH)
        return web.Response(body=endpoint.response(body))

    return fault


def asked_for(server: FakeEndpoint, prompt: np.ndarray = PROMPT) -> int:
    """How often it was sent ``prompt``; what else it was sent is the canary prompt."""
    return sum(request["token_ids"] == prompt.tolist() for request in server.requests)


# -- two endpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [400, 413, 422, 401, 403, 404, 405])
async def test_an_endpoint_that_refuses_everything_is_set_aside_and_costs_no_prompt(code):
    bad, good = servers(2)
    bad.always = status(code, "bad request")
    async with pool_of(bad, good, health_interval_s=60, back_off_s=30) as pool:
        done = await asyncio.wait_for(asyncio.gather(*[ask(pool, seed) for seed in range(20)]), 10)
        assert [int(completion.token_ids[0]) for completion in done] == list(range(20))
        assert {completion.endpoint for completion in done} == {good.url}
        assert "bad request" in pool.endpoints[0].down


async def test_a_prompt_that_two_endpoints_refuse_is_refused_and_neither_is_at_fault():
    group = servers(2, always=refuses())
    async with pool_of(*group) as pool:
        with pytest.raises(PromptRejected, match=TOO_MUCH) as caught:
            await ask(pool, 0)
        assert all(server.url in str(caught.value) for server in group)
        assert [asked_for(server) for server in group] == [1, 1]
        assert all(e.is_up and e.num_failures == 0 for e in pool.endpoints)
        assert (await sample(pool, OTHER, SAMPLING, 5)).token_ids[0] == 5


async def test_an_endpoint_that_refuses_what_another_serves_has_a_fault():
    picky, good = servers(2)
    picky.faults.append(status(400, "no"))
    async with pool_of(picky, good, back_off_s=30) as pool:
        assert (await ask(pool, 3)).endpoint == good.url
        assert asked_for(good) == 1 and seeds(good) == [3]
        endpoint = pool.endpoints[0]
        assert endpoint.num_failures == 1 and "another endpoint" in endpoint.down
        assert endpoint.excluded is None


@pytest.mark.parametrize("passes", [True, False])
async def test_a_refusal_by_one_that_is_not_cleared_counts_no_more_than_a_response(passes):
    server, other = servers(2)
    server.always = refuses()
    async with pool_of(server, other, health_interval_s=60) as pool:
        doubted, spare = pool.endpoints
        pool.confirm(doubted, V1, cleared=False)
        spare.down = "not up yet"
        task = ask(pool, 3)
        await server.until(lambda: len(server.requests) == 2)  # the canary prompt, too
        await asyncio.sleep(0.1)
        assert not task.done() and pool.num_retries == 0
        spare.down = None
        if passes:
            pool.clear(doubted)
        else:
            pool.quarantine(doubted, "canary: log-probabilities differ")
        assert (await asyncio.wait_for(task, 10)).endpoint == other.url
        assert doubted.num_failures == int(passes)  # for refusing what the other served


async def test_one_that_does_so_again_and_again_is_excluded():
    picky, good = servers(2)
    picky.always = refuses()
    async with pool_of(picky, good) as pool:
        for seed in range(3):
            await until(lambda: pool.endpoints[0].usable(V1))
            pool.confirm(pool.endpoints[0], V1)
            good_load = pool.endpoints[1]
            good_load.outstanding_tokens += 100  # so that the picky one is asked first
            assert (await ask(pool, seed)).endpoint == good.url
            good_load.outstanding_tokens -= 100
        assert "refused 3 prompts" in (pool.endpoints[0].excluded or "")
        assert TOO_MUCH in pool.endpoints[0].excluded
        assert pool.endpoints[1].excluded is None


async def test_many_refusals_at_once_are_one_fault_and_one_canary():
    picky, good = servers(2, gated=True)
    picky.always = refuses()
    async with pool_of(picky, good, max_inflight=20, back_off_s=30) as pool:
        tasks = [ask(pool, seed) for seed in range(60)]
        await picky.until(lambda: len(picky.requests) == 20)
        for gate in picky.gates:
            gate.set()
        await picky.until(lambda: len(picky.requests) == 21)
        await asyncio.sleep(0.05)
        assert len(picky.requests) == 21  # one canary, and nothing new while it is looked at
        picky.gated = good.gated = False
        for gate in [*picky.gates, *good.gates]:
            gate.set()
        done = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert [int(completion.token_ids[0]) for completion in done] == list(range(60))
        assert {completion.endpoint for completion in done} == {good.url}
        endpoint = pool.endpoints[0]
        assert endpoint.num_false_refusals == 1 and endpoint.excluded is None


async def test_two_endpoints_that_refuse_everything_are_both_at_fault():
    group = servers(2, always=status(400, "nothing today"))
    async with pool_of(*group, max_outage_s=0.5, max_retries=2) as pool:
        tasks = [ask(pool, seed) for seed in range(4)]
        for task in tasks:
            with pytest.raises(Outage, match="nothing today"):
                await task
        group[1].always = None
        assert (await ask(pool, 9)).endpoint == group[1].url


async def test_an_endpoint_that_cannot_apply_stop_strings_costs_no_prompt():
    bad, good = servers(2)
    bad.has_tokenizer = False
    stops = SAMPLING.model_copy(update={"stop": ["END"]})
    async with pool_of(bad, good, health_interval_s=60, back_off_s=30) as pool:
        done = await asyncio.gather(*[sample(pool, PROMPT, stops, seed) for seed in range(6)])
        assert {completion.endpoint for completion in done} == {good.url}
        assert "rollout.stop" in pool.endpoints[0].down and not bad.requests


# -- one endpoint while its neighbour is away ----------------------------------------------------


async def away(pool: Any, server: FakeEndpoint, number: int = 1) -> None:
    await server.stop()
    await until(lambda: not pool.endpoints[number].is_up)


async def refused_once(server: FakeEndpoint, *tasks: asyncio.Task) -> None:
    """Each of ``tasks`` was refused, and the canary prompt served."""
    await server.until(lambda: asked_for(server) >= len(tasks) and server.num_open == 0)
    await asyncio.sleep(0.3)  # several health probes: time to ask again, or to give up
    assert asked_for(server) == len(tasks)
    assert not any(task.done() for task in tasks)


async def test_a_refused_prompt_waits_for_an_endpoint_that_restarts_and_holds_up_no_other():
    liar, restarting = servers(2)
    liar.always = refuses()
    async with pool_of(liar, restarting, max_inflight=2, back_off_s=0.05) as pool:
        pool.set_repair(repairer(pool))
        await away(pool, restarting)
        tasks = [ask(pool, seed) for seed in range(6)]
        await refused_once(liar, *tasks)
        assert pool.in_outage  # for the watchdog: it is not the run that hangs
        others = [sample(pool, OTHER, SAMPLING, seed) for seed in range(8)]
        done = await asyncio.wait_for(asyncio.gather(*others), 10)
        assert {completion.endpoint for completion in done} == {liar.url}
        assert not any(task.done() for task in tasks)
        await restarting.restart()
        done = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert {completion.endpoint for completion in done} == {restarting.url}
        assert [int(completion.token_ids[0]) for completion in done] == list(range(6))
        assert pool.endpoints[0].num_false_refusals == 1
        await until(lambda: not pool.in_outage)


async def test_the_one_that_returns_may_confirm_the_refusal():
    first, restarting = servers(2, always=refuses())
    async with pool_of(first, restarting) as pool:
        pool.set_repair(repairer(pool))
        await away(pool, restarting)
        task = ask(pool, 0)
        await refused_once(first, task)
        await restarting.restart()
        with pytest.raises(PromptRejected) as caught:
            await asyncio.wait_for(task, 10)
        assert all(server.url in str(caught.value) for server in (first, restarting))
        assert [asked_for(server) for server in (first, restarting)] == [1, 1]
        assert pool.endpoints[0].num_failures == 0


async def test_one_that_is_away_for_the_longest_outage_is_waited_for_once():
    lone, gone = servers(2)
    lone.always = refuses()
    async with pool_of(lone, gone, max_outage_s=2) as pool:
        pool.set_repair(repairer(pool))
        await away(pool, gone)
        task = ask(pool, 0)
        await refused_once(lone, task)
        with pytest.raises(PromptRejected, match=TOO_MUCH):
            await asyncio.wait_for(task, 10)
        assert asked_for(lone) == 2 and lone.url in str(task.exception())
        for seed in range(3):  # nobody is hoped for any more
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(PromptRejected):
                await asyncio.wait_for(ask(pool, seed), 10)
            assert asyncio.get_running_loop().time() - began_s < 1.5
        await gone.restart()
        await until(lambda: pool.endpoints[1].usable(V1))
        assert (await asyncio.wait_for(ask(pool, 7), 10)).endpoint == gone.url
        await away(pool, gone)  # it was there: it is waited for again
        await until(lambda: pool.endpoints[0].usable(V1))
        lone.requests.clear()
        await refused_once(lone, last := ask(pool, 8))
        last.cancel()


@pytest.mark.parametrize("how", ["excluded", "removed"])
async def test_a_refused_prompt_waits_no_longer_when_nobody_else_is_left(how):
    lone, gone = servers(2)
    lone.always = refuses()
    async with pool_of(lone, gone) as pool:
        pool.set_repair(repairer(pool))
        await away(pool, gone)
        task = ask(pool, 0)
        await refused_once(lone, task)
        if how == "excluded":
            pool.exclude(pool.endpoints[1], "another model")
        else:
            pool.remove(gone.url)
        with pytest.raises(PromptRejected):
            await asyncio.wait_for(task, 10)
        assert asked_for(lone) == 2


async def test_a_refusal_stands_where_the_others_fail_as_often_as_they_may():
    """As one that fails every request does not end the run of a prompt that nobody else takes."""
    lone, broken = servers(2)
    lone.always = refuses()
    broken.always = status(500, "out of memory")
    async with pool_of(lone, broken, max_retries=2) as pool:
        with pytest.raises(PromptRejected, match=TOO_MUCH) as caught:
            await asyncio.wait_for(ask(pool, 0), 10)
        assert "out of memory" in str(caught.value)
        assert asked_for(broken) == 3 and asked_for(lone) == 1


async def test_nobody_is_waited_for_whose_context_has_no_room():
    large, small = servers(2)
    large.always = refuses()
    small.max_model_len = 3
    async with pool_of(large, small) as pool:
        await known(pool)
        await away(pool, small)
        with pytest.raises(PromptRejected):
            await asyncio.wait_for(ask(pool, 0), 10)
        assert asked_for(large) == 2


async def test_a_refused_prompt_is_asked_for_as_long_as_the_one_that_returns_has_room():
    large, small = servers(2)
    large.always = refuses()
    large.max_model_len, small.max_model_len = 1000, 10
    async with pool_of(large, small) as pool:
        await known(pool)
        pool.set_repair(repairer(pool))
        await away(pool, small)
        wide = SamplingConfig(max_tokens=50)
        task = asyncio.ensure_future(sample(pool, PROMPT, wide, 3))
        await refused_once(large, task)
        await small.restart()
        assert (await asyncio.wait_for(task, 10)).endpoint == small.url
        assert small.requests[-1]["sampling_params"]["max_tokens"] == 7


async def test_waiting_for_another_endpoint_is_no_part_of_a_later_outage():
    """All are down for less than the longest outage: whoever waits goes on."""
    lone, gone = servers(2)
    lone.always = refuses()
    async with pool_of(lone, gone, max_outage_s=1.5) as pool:
        pool.set_repair(repairer(pool))
        await away(pool, gone)
        refused = ask(pool, 0)
        await refused_once(lone, refused)
        await asyncio.sleep(0.6)
        await away(pool, lone, 0)
        other = asyncio.ensure_future(sample(pool, OTHER, SAMPLING, 1))
        await asyncio.sleep(0.9)  # 1.8 s since the first is away, 0.9 s without any
        assert not other.done() and not refused.done()
        await lone.restart()
        assert (await asyncio.wait_for(other, 10)).endpoint == lone.url
        with pytest.raises(PromptRejected):
            await asyncio.wait_for(refused, 10)


# -- one endpoint --------------------------------------------------------------------------------


async def test_with_one_endpoint_the_canary_prompt_decides_for_the_endpoint():
    (server,) = servers(1, always=refuses())
    async with pool_of(server) as pool:
        with pytest.raises(PromptRejected, match=TOO_MUCH):
            await ask(pool, 0)
        assert asked_for(server) == 2  # asked again behind the first canary
        assert pool.endpoints[0].is_up and pool.endpoints[0].num_failures == 0
        assert (await sample(pool, OTHER, SAMPLING, 1)).token_ids[0] == 1


async def test_with_one_endpoint_the_canary_prompt_decides_against_it():
    """As with a dead one: requests wait until it serves the canary, however healthy it says."""
    (server,) = servers(1, always=status(422, "cannot process"))
    async with pool_of(server, max_retries=1) as pool:
        pool.set_repair(repairer(pool))
        tasks = [ask(pool, seed) for seed in range(5)]
        await until(lambda: pool.endpoints[0].down is not None)
        await asyncio.sleep(0.4)  # several health probes
        assert not any(task.done() for task in tasks)
        assert pool.in_outage and "cannot process" in pool.endpoints[0].down
        server.always = None
        done = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert [int(completion.token_ids[0]) for completion in done] == list(range(5))


async def test_256_refusals_at_once_cost_one_canary():
    (server,) = servers(1, gated=True, always=status(400, "no"))
    async with pool_of(server, max_outage_s=0.3, back_off_s=30) as pool:
        tasks = [ask(pool, seed) for seed in range(256)]
        await server.until(lambda: len(server.requests) == 256)
        server.gated = False
        for gate in server.gates:
            gate.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, Outage) for outcome in outcomes)
        assert len(server.requests) == 257


async def test_an_endpoint_that_refuses_only_now_and_then_loses_no_prompt():
    (server,) = servers(1)
    server.faults.append(status(400, "sometimes"))
    async with pool_of(server) as pool:
        assert (await ask(pool, 4)).token_ids[0] == 4
        assert pool.endpoints[0].num_failures == 1


async def test_the_canary_is_asked_with_the_samplings_parameters_and_few_tokens():
    (server,) = servers(1, always=refuses())
    async with pool_of(server) as pool:
        sampling = SamplingConfig(max_tokens=100, min_tokens=7, temperature=0.25, top_k=3)
        with pytest.raises(PromptRejected):
            await sample(pool, PROMPT, sampling, 0)
        canary = next(r for r in server.requests if r["token_ids"] != PROMPT.tolist())
        params = canary["sampling_params"]
        assert (params["temperature"], params["top_k"]) == (0.25, 3)
        assert (params["max_tokens"], params["min_tokens"]) == (1, 1)


async def test_a_canary_that_hangs_ends_with_its_endpoint():
    """The refused request waits for it, and goes elsewhere when the endpoint is given up."""
    stuck, other = servers(2)
    stuck.faults.append(status(400, "no"))

    async def hang_on_the_canary(*_: Any) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    stuck.always = hang_on_the_canary
    async with pool_of(stuck, other, progress_timeout_s=0.3, back_off_s=30) as pool:
        assert (await asyncio.wait_for(ask(pool, 0), 10)).endpoint == other.url
        assert pool.endpoints[0].num_inflight == 0 and not pool.endpoints[0].attempts


# -- contexts ------------------------------------------------------------------------------------


async def known(pool: Any) -> None:
    await until(lambda: all(e.served is not None and e.is_up for e in pool.endpoints))


async def test_requests_go_only_where_they_fit():
    small, large = servers(2)
    small.max_model_len, large.max_model_len = 10, 1000
    async with pool_of(small, large) as pool:
        await known(pool)
        wide = [sample(pool, PROMPT, SamplingConfig(max_tokens=50), n) for n in range(6)]
        await asyncio.gather(*wide)
        assert not small.requests
        await asyncio.gather(*[sample(pool, PROMPT, SAMPLING.model_copy(update={"max_tokens": 7}),
                                      n) for n in range(6)])  # fmt: skip
        assert len(small.requests) == 3
        assert {r["sampling_params"]["max_tokens"] for r in large.requests} == {50, 7}


@pytest.mark.parametrize("claimed", [4, 1, 0, -5])
async def test_one_endpoints_short_context_excludes_no_prompt(claimed, caplog):
    liar, honest = servers(2)
    liar.max_model_len = claimed
    async with pool_of(liar, honest) as pool:
        await until(lambda: pool.endpoints[0].served is not None and pool.endpoints[1].is_up)
        done = await asyncio.gather(*[ask(pool, seed) for seed in range(8)])
        assert {completion.endpoint for completion in done} == {honest.url}
        assert not liar.requests
        if claimed < 2:
            await until(lambda: pool.endpoints[0].excluded is not None)
            await asyncio.sleep(0.2)
            said = [r.message for r in caplog.records if liar.url in r.message]
            assert len(said) == 1 and f"{claimed} tokens" in said[0]


@pytest.mark.parametrize("claimed", [10**12, None])
async def test_an_absurd_context_shortens_and_excludes_nothing(claimed):
    """What fits only there is refused there, and asked for elsewhere as far as that has room."""
    liar, honest = servers(2, max_model_len=10)
    liar.max_model_len = claimed

    async def limited(
        endpoint: FakeEndpoint, request: web.Request, body: dict
    ) -> web.StreamResponse:
        if len(body["token_ids"]) + body["sampling_params"]["max_tokens"] > 10:
            return error_response(400, "longer than the model's context")
        return web.Response(body=endpoint.response(body))

    liar.always = limited
    async with pool_of(liar, honest) as pool:
        await known(pool)
        wide = SamplingConfig(max_tokens=50)
        done = await asyncio.wait_for(sample(pool, PROMPT, wide, 1), 10)
        assert done.endpoint == honest.url
        assert honest.requests[-1]["sampling_params"]["max_tokens"] == 7
        assert pool.endpoints[0].num_failures == 1


async def test_a_prompt_is_too_long_only_if_it_is_for_every_endpoint():
    group = servers(2)
    group[0].max_model_len, group[1].max_model_len = 3, 2
    async with pool_of(*group) as pool:
        await known(pool)
        with pytest.raises(PromptTooLong, match="context length is 3 tokens, .* a prompt of 3 "):
            await ask(pool, 0)
        assert (await sample(pool, OTHER, SAMPLING, 1)).endpoint == group[0].url


async def test_what_waits_for_the_larger_endpoint_goes_elsewhere_when_that_is_gone():
    small, large = servers(2, gated=True)
    small.max_model_len, large.max_model_len = 10, 1000
    async with pool_of(small, large, max_inflight=1, back_off_s=30) as pool:
        await known(pool)
        wide = SamplingConfig(max_tokens=50)
        tasks = [asyncio.ensure_future(sample(pool, PROMPT, wide, n)) for n in range(3)]
        await large.until(lambda: len(large.requests) == 1)
        assert not small.requests
        small.gated = False
        pool.set_aside(pool.endpoints[1], EndpointUnavailable(large.url, "gone"))
        await small.until(lambda: len(small.requests) == 2)
        assert {r["sampling_params"]["max_tokens"] for r in small.requests} == {7}
        await open_all(tasks, large)


async def test_a_prompt_that_fits_only_where_nobody_is_now_waits():
    small, large = servers(2)
    small.max_model_len, large.max_model_len = 4, 1000
    long = np.arange(5, 15, dtype=np.int32)
    async with pool_of(small, large) as pool:
        pool.set_repair(repairer(pool))
        await known(pool)
        await large.stop()
        await until(lambda: not pool.endpoints[1].is_up)
        task = asyncio.ensure_future(sample(pool, long, SAMPLING, 1))
        await asyncio.sleep(0.1)
        assert not task.done()
        await large.restart()
        assert (await asyncio.wait_for(task, 10)).endpoint == large.url


async def test_a_context_that_is_no_number_is_the_endpoints_fault():
    bad, good = servers(2)
    bad.max_model_len = "many"  # type: ignore[assignment]
    async with pool_of(bad, good) as pool:
        await until(lambda: pool.endpoints[1].served is not None)
        await until(lambda: "max_model_len" in (pool.endpoints[0].down or ""))
        assert (await ask(pool, 0)).endpoint == good.url
