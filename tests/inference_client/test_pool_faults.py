"""Endpoints that die, hang, restart, come and go: every sample is answered exactly once."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest

from easyrl.inference_client.errors import (
    EndpointError,
    EndpointUnavailable,
    NoEndpointError,
    Outage,
    PromptRejected,
)
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.schema import Completion
from tests.inference_client.fake_endpoint import FakeEndpoint, break_off, hang, status, truncate
from tests.inference_client.pool_cases import (
    PROMPT,
    V1,
    V2,
    ask,
    open_all,
    pool_of,
    repairer,
    servers,
    until,
)


def answered(tasks: list[asyncio.Task[Completion]]) -> list[int]:
    """The seeds of the completions, in order of the tasks."""
    return [int(task.result().token_ids[0]) for task in tasks]


# -- what is told --------------------------------------------------------------------------------


async def test_each_failed_request_is_told_by_its_endpoint_with_the_error():
    broken, other = servers(2)
    broken.faults.extend([break_off, truncate, status(500, "out of memory")])
    told: list[tuple[str, str, Any]] = []

    def span(url: str, name: str, began_s: float, ended_s: float, **args: Any) -> None:
        assert began_s <= ended_s
        told.append((url, name, args.get("problem")))

    async with pool_of(broken, other) as pool:
        pool.span = span
        async with asyncio.timeout(10):
            while sum(name == "failed request" for _, name, _ in told) < 3:
                await ask(pool, len(told))
                await asyncio.sleep(0.02)
    failed = [each for each in told if each[1] == "failed request"]
    assert {url for url, _, _ in failed} == {broken.url}
    assert all(problem and problem.isidentifier() for _, _, problem in failed)
    assert all(problem is None for _, name, problem in told if name == "request")


# -- hanging -------------------------------------------------------------------------------------


async def test_what_a_stopped_process_has_in_flight_goes_to_the_others_with_the_same_seed():
    stopped, other = servers(2, gated=True)
    async with pool_of(stopped, other) as pool:
        tasks = [ask(pool, seed) for seed in range(8)]
        await stopped.until(lambda: len(stopped.requests) == 4)
        held = {request["sampling_params"]["seed"] for request in stopped.requests}
        stopped.running.clear()
        await other.until(lambda: len(other.requests) == 8)
        assert held < {request["sampling_params"]["seed"] for request in other.requests}
        assert "health probes unanswered" in pool.endpoints[0].status(V1)
        await open_all(tasks, other)
        assert answered(tasks) == list(range(8))
        assert {task.result().endpoint for task in tasks} == {other.url}
        stopped.running.set()  # SIGCONT: it still has its weights
        await until(lambda: pool.endpoints[0].usable(V1))
        stopped.gated = False
        assert await ask(pool, 9)
        assert pool.endpoints[0].num_inflight == 0 and pool.endpoints[0].outstanding_tokens == 0


async def test_a_slow_endpoint_that_answers_health_is_not_given_up():
    slow, fast = servers(2, gated=True)
    fast.gated = False
    async with pool_of(slow, fast, progress_timeout_s=60) as pool:
        tasks = [ask(pool, seed) for seed in range(6)]
        await slow.until(lambda: len(slow.requests) == 3)
        await asyncio.sleep(1.0)  # 20 probes
        assert pool.endpoints[0].is_up and pool.num_retries == 0
        await open_all(tasks, slow)
        assert answered(tasks) == list(range(6)) and slow.num_disconnected == 0


async def test_an_endpoint_without_any_progress_is_given_up():
    dead, other = servers(2)
    dead.gated = True
    async with pool_of(dead, other, progress_timeout_s=0.4, back_off_s=30) as pool:
        tasks = [ask(pool, seed) for seed in range(2)]
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert answered(tasks) == [0, 1] and pool.num_retries == 1
        assert "no progress" in pool.endpoints[0].down


async def test_tokens_that_are_still_made_are_progress():
    """The last long response of a batch: nothing is answered, only the counter moves."""
    (server,) = servers(1, gated=True, generated_tokens=0)
    async with pool_of(server, progress_timeout_s=0.4) as pool:
        task = ask(pool, 0)
        await server.until(lambda: len(server.requests) == 1)
        for _ in range(24):
            await asyncio.sleep(0.05)
            server.generated_tokens += 1
        assert pool.num_retries == 0 and pool.endpoints[0].is_up
        await until(lambda: pool.endpoints[0].down is not None)  # the counter stands still now
        assert "no progress" in pool.endpoints[0].down
        await open_all([task], server)


@pytest.mark.parametrize("has_answered", [True, False])
async def test_tokens_that_are_counted_and_never_answered_are_not_progress_for_ever(has_answered):
    """Somebody else's, or made up: at the speed of what was answered ours are long overdue."""
    lost, other = servers(2, generated_tokens=0)
    async with pool_of(lost, other, progress_timeout_s=0.4, back_off_s=30) as pool:
        first, second = pool.endpoints
        (first if has_answered else second).answered(1000, took_s=1.0)
        lost.gated = True
        task = asyncio.ensure_future(counting(lost, ask(pool, 0)))
        assert (await asyncio.wait_for(task, 10)).endpoint == other.url
        assert first.num_failures == pool.num_retries == 1
        assert "no answer for" in first.down and "counters" in first.down


async def test_a_response_has_the_time_that_it_can_take_at_its_endpoints_speed():
    slow, other = servers(2, generated_tokens=0)
    async with pool_of(slow, other, progress_timeout_s=0.2) as pool:
        first, second = pool.endpoints
        first.answered(10, took_s=1.0)  # 0.1 s for a token: 6.4 s, 8 times as long, for 8
        second.answered(1000, took_s=0.001)
        slow.gated = True
        task = asyncio.ensure_future(counting(slow, ask(pool, 0)))
        await asyncio.sleep(1.5)
        assert first.is_up and pool.num_retries == 0
        slow.gates[0].set()
        assert (await task).endpoint == slow.url


async def counting(server: FakeEndpoint, asked: asyncio.Task[Completion]) -> Completion:
    """Waits for the response while the server counts tokens."""
    while not asked.done():
        server.generated_tokens += 1
        await asyncio.sleep(0.02)
    return asked.result()


async def test_one_unanswered_probe_is_not_a_hang():
    (server,) = servers(1, gated=True)
    async with pool_of(server, probe_timeout_s=0.2) as pool:
        task = ask(pool, 0)
        await server.until(lambda: len(server.requests) == 1)
        server.running.clear()
        await until(lambda: pool.endpoints[0].num_unanswered == 1)
        server.running.set()
        await until(lambda: pool.endpoints[0].num_unanswered == 0)
        await open_all([task], server)
        assert pool.num_retries == 0


async def test_a_cancelled_request_stays_cancelled_when_its_endpoint_is_given_up():
    (server,) = servers(1, gated=True)
    async with pool_of(server) as pool:
        task = ask(pool, 0)
        await server.until(lambda: len(server.requests) == 1)
        pool.endpoints[0].abort_attempts(EndpointUnavailable(server.url, "hangs"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.endpoints[0].num_inflight == 0 and not pool.endpoints[0].attempts


# -- coming back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [True, False])
async def test_a_restarted_endpoint_is_repaired_and_used_in_the_same_batch(busy):
    restarting, other = servers(2, gated=True)
    async with pool_of(restarting, other, max_inflight=2) as pool:
        repair = repairer(pool)
        pool.set_repair(repair)
        tasks = [ask(pool, seed) for seed in range(8)] if busy else []
        if busy:
            await restarting.until(lambda: len(restarting.requests) == 2)
        await restarting.restart()
        await until(lambda: repair.repaired == [restarting.url])
        await until(lambda: pool.endpoints[0].usable(V1))
        tasks += [ask(pool, seed) for seed in range(len(tasks), 10)]
        await open_all(tasks, restarting, other)
        assert answered(tasks) == list(range(10))
        assert Counter(t.result().endpoint for t in tasks)[restarting.url] >= 2
        assert {s.version for t in tasks for s in t.result().version_spans} == {V1}


async def test_what_was_down_is_not_used_before_its_repair_whatever_version_it_shows():
    (server,) = servers(1)
    proved = asyncio.Event()
    async with pool_of(server) as pool:

        async def repair(endpoint: Endpoint) -> None:
            await proved.wait()
            pool.confirm(endpoint, V1)

        pool.set_repair(repair)
        (endpoint,) = pool.endpoints
        await server.stop()
        await until(lambda: endpoint.down is not None)
        await server.restart(version=V1)  # somebody has pushed, nothing is proved
        await until(lambda: endpoint.down is None and endpoint.repairing)
        assert not endpoint.usable(V1)
        proved.set()
        await until(lambda: endpoint.usable(V1))


async def test_a_look_that_fails_is_not_the_last(monkeypatch):
    (server,) = servers(1)
    async with pool_of(server) as pool:
        (endpoint,) = pool.endpoints

        async def fail(timeout_s: float) -> str:
            raise OSError("not an endpoint's error")

        with monkeypatch.context() as patched:
            patched.setattr(endpoint.client, "weight_version", fail)
            await asyncio.sleep(0.2)
        await server.stop()
        await until(lambda: endpoint.down is not None)


async def test_a_restart_that_only_a_response_shows_is_repaired_too():
    (server,) = servers(1)
    server.version = "default"
    async with pool_of(server, health_interval_s=60) as pool:
        repair = repairer(pool)
        pool.set_repair(repair)
        pool.confirm(pool.endpoints[0], V1)
        tasks = [ask(pool, seed) for seed in range(4)]
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert repair.repaired == [server.url] and answered(tasks) == list(range(4))
        assert {s.version for t in tasks for s in t.result().version_spans} == {V1}


async def test_an_endpoint_that_is_not_confirmed_for_the_current_version_is_repaired():
    behind, current = FakeEndpoint(version=V1), FakeEndpoint(version=V2)
    async with pool_of(behind, current, confirmed=False) as pool:
        repair = repairer(pool, V2)
        pool.set_repair(repair)
        await pool.wait_until_healthy()
        await asyncio.sleep(0.2)
        assert repair.repaired == []  # nothing is current yet
        pool.confirm(pool.endpoints[1], V2)
        await until(lambda: pool.endpoints[0].usable(V2))
        assert repair.repaired == [behind.url]
        pool.withdraw_confirmations()
        await asyncio.sleep(0.2)
        assert repair.repaired == [behind.url]  # the weights move: whoever moves them confirms


async def test_a_repair_that_is_not_answered_is_tried_again_and_one_that_fails_excludes():
    failing, other = servers(2)
    errors: list[EndpointError] = [
        EndpointUnavailable("x", "connection reset"),
        EndpointError("x", "3 weights have another checksum"),
    ]

    async def repair(endpoint: Endpoint) -> None:
        raise errors.pop(0)

    async with pool_of(failing, other) as pool:
        pool.set_repair(repair)
        failing.version = "default"
        await until(lambda: pool.endpoints[0].excluded is not None)
        assert "checksum" in pool.endpoints[0].excluded and errors == []
        assert pool.endpoints[0].num_failures == 1  # the first
        assert (await ask(pool, 0)).endpoint == other.url
        failing.version = V1
        await asyncio.sleep(0.2)
        assert not pool.endpoints[0].usable(V1)
        pool.remove(failing.url)
        pool.set_repair(repairer(pool))
        endpoint = pool.add(failing.url)
        await until(lambda: endpoint.usable(V1))


async def test_weight_sync_may_set_an_endpoint_aside():
    first, second = servers(2)
    async with pool_of(first, second, health_interval_s=60, back_off_s=0.2) as pool:
        pool.set_aside(pool.endpoints[0], EndpointUnavailable(first.url, "did not answer"))
        assert pool.endpoints[0].down == "did not answer"
        assert (await ask(pool, 0)).endpoint == second.url
        await until(lambda: pool.endpoints[0].usable(V1))


async def test_who_fails_a_proof_is_out_of_use_and_its_requests_go_elsewhere():
    """Until it is confirmed again; nobody takes it for down meanwhile."""
    first, second = servers(2, gated=True)
    async with pool_of(first, second, health_interval_s=60) as pool:
        tasks = [ask(pool, seed) for seed in range(4)]
        await first.until(lambda: len(first.requests) == 2)
        doubted = pool.endpoints[0]
        pool.quarantine(doubted, "serves other weights")
        assert not doubted.usable(V1) and doubted.is_up
        assert "serves other weights" in doubted.status(V1)
        await second.until(lambda: len(second.requests) == 4)
        await open_all(tasks, first, second)
        assert {task.result().endpoint for task in tasks} == {second.url}
        assert doubted.is_up and doubted.num_failures == 0
        pool.confirm(doubted, V1)
        assert doubted.usable(V1)


async def test_what_one_answers_before_it_is_cleared_is_held_back():
    (server,) = servers(1)
    async with pool_of(server, health_interval_s=60) as pool:
        (endpoint,) = pool.endpoints
        pool.confirm(endpoint, V1, cleared=False)
        tasks = [ask(pool, seed) for seed in range(2)]
        await server.until(lambda: len(server.requests) == 2)
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in tasks) and endpoint.num_completed == 0
        pool.clear(endpoint)
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert answered(tasks) == [0, 1] and len(server.requests) == 2
        assert endpoint.num_completed == 2 and not endpoint.attempts


async def test_one_whose_answers_are_held_back_is_kept_busy_and_does_not_hang():
    """Each place is free as soon as its response is there; waiting is the trainer's, not its."""
    (server,) = servers(1, num_tokens=1)
    async with pool_of(server, max_inflight=2, progress_timeout_s=0.2) as pool:
        (endpoint,) = pool.endpoints
        pool.confirm(endpoint, V1, cleared=False)
        tasks = [ask(pool, seed) for seed in range(6)]
        await server.until(lambda: len(server.requests) == 6)
        await asyncio.sleep(0.6)
        assert endpoint.is_up and pool.num_retries == 0
        assert endpoint.num_inflight == endpoint.outstanding_tokens == 0
        assert endpoint.idle_s() > 0.5 and endpoint.s_per_token is None
        pool.clear(endpoint)
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert answered(tasks) == list(range(6)) and len(server.requests) == 6
        assert endpoint.s_per_token < 0.2  # that it was held back is no time of its own


async def test_what_was_held_back_when_its_endpoint_was_removed_is_handed_out_when_it_passes():
    (server,) = servers(1)
    async with pool_of(server, health_interval_s=60) as pool:
        (endpoint,) = pool.endpoints
        pool.confirm(endpoint, V1, cleared=False)
        task = ask(pool, 0)
        await server.until(lambda: len(server.requests) == 1)
        await until(lambda: endpoint.num_inflight == 0)
        pool.remove(server.url)
        assert pool.endpoints == [] and not task.done()
        pool.clear(endpoint)
        assert (await asyncio.wait_for(task, 10)).endpoint == server.url


async def test_what_one_answers_before_it_fails_is_answered_by_another():
    first, second = servers(2)
    async with pool_of(first, second, health_interval_s=60) as pool:
        doubted = pool.endpoints[0]
        pool.confirm(doubted, V1, cleared=False)
        tasks = [ask(pool, seed) for seed in range(4)]
        await first.until(lambda: len(first.requests) == 2)
        await until(lambda: sum(task.done() for task in tasks) == 2)
        await asyncio.sleep(0.1)  # the first has answered, too
        pool.quarantine(doubted, "canary: log-probabilities differ")
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert {task.result().endpoint for task in tasks} == {second.url}
        assert answered(tasks) == list(range(4))
        pool.confirm(doubted, V1)
        assert {(await ask(pool, 9)).endpoint, (await ask(pool, 9)).endpoint} <= {
            first.url,
            second.url,
        }


async def test_responses_carry_the_number_of_their_endpoints_proof():
    """Of the last good one when they came; numbers go on when an endpoint leaves and comes back."""
    (server,) = servers(1, gated=True)
    async with pool_of(server, health_interval_s=60) as pool:
        task = ask(pool, 0)
        await server.until(lambda: len(server.requests) == 1)
        pool.confirm(pool.endpoints[0], V1)  # away and back in the middle
        await open_all([task], server)
        assert task.result().proof == pool.endpoints[0].proof == 2
        pool.remove(server.url)
        pool.confirm(pool.add(server.url), V1)
        assert (await ask(pool, 1)).proof == 3


# -- all dead ------------------------------------------------------------------------------------


async def test_when_all_are_dead_requests_wait_and_go_on_when_one_returns(caplog):
    group = servers(2, always=hang)
    async with pool_of(*group, max_retries=3) as pool:
        pool.set_repair(repairer(pool))
        tasks = [ask(pool, seed) for seed in range(6)]
        await until(lambda: all(len(server.requests) == 3 for server in group))
        for server in group:
            await server.stop()
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in tasks)
        said = [r.message for r in caplog.records if "waiting for one to return" in r.message]
        assert len(said) == 1 and all(server.url in said[0] for server in group)
        assert "for 1800 s at most" in said[0]
        group[1].always = None
        await group[1].restart()
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
        assert answered(tasks) == list(range(6))
        await until(lambda: "there again" in caplog.text)


async def test_an_outage_that_lasts_is_told_every_half_minute_and_then_ends_the_waiting(
    caplog, monkeypatch
):
    monkeypatch.setattr("easyrl.inference_client.pool.dispatch.SAY_INTERVAL_S", 0.2)
    (server,) = servers(1)
    async with pool_of(server, max_outage_s=0.7) as pool:
        await server.stop()
        tasks = [ask(pool, seed) for seed in range(3)]
        for task in tasks:
            with pytest.raises(Outage, match=rf"(?s){server.url}: down.*max_outage_s"):
                await task
        assert caplog.text.count("still waiting") == 3
        with pytest.raises(Outage):  # and again for who asks later
            await ask(pool, 4)


async def test_a_repair_under_way_is_waited_for_beyond_the_limit():
    (server,) = servers(1)
    async with pool_of(server, max_outage_s=0.2) as pool:

        async def slow(endpoint: Endpoint) -> None:
            await asyncio.sleep(0.6)
            await repairer(pool)(endpoint)

        pool.set_repair(slow)
        server.version = "default"
        await until(lambda: pool.endpoints[0].repairing)
        assert (await ask(pool, 0)).token_ids[0] == 0


async def test_groups_that_wait_for_their_turn_are_ended_by_an_outage():
    (server,) = servers(1)
    async with pool_of(server, max_outage_s=0.3) as pool:
        await server.stop()
        pool.set_aside(pool.endpoints[0], EndpointUnavailable(server.url, "gone"))
        with pytest.raises(Outage):
            async with pool.group(3, 4, V1, num_samples=2):
                raise AssertionError("no turn without an endpoint")


async def test_until_live_waits_for_the_first(caplog):
    group = servers(2)
    async with pool_of(*group) as pool:
        for endpoint in pool.endpoints:
            pool.set_aside(endpoint, EndpointUnavailable(endpoint.url, "gone"))
        pool.withdraw_confirmations()
        live = await pool.until_live(10)
        assert live and all(endpoint.is_up for endpoint in live)
        assert "waiting for one to return" in caplog.text
        for server in group:
            await server.stop()
        await until(lambda: not any(endpoint.is_up for endpoint in pool.endpoints))
        with pytest.raises(
            Outage, match=r"for 0.2 s \(inference.max_outage_s\); start the servers again"
        ):
            await pool.until_live(0.2)
        for endpoint in pool.endpoints:
            pool.exclude(endpoint, "wrong checksum")
        with pytest.raises(NoEndpointError, match="excluded: wrong checksum") as caught:
            await pool.until_live(10)
        assert not isinstance(caught.value, Outage)


async def test_when_all_are_excluded_nobody_waits():
    group = servers(2, gated=True)
    async with pool_of(*group, max_inflight=1) as pool:
        tasks = [ask(pool, seed) for seed in range(4)]
        await until(lambda: sum(len(server.requests) for server in group) == 2)
        for endpoint in pool.endpoints:
            pool.exclude(endpoint, "failed its proof twice")
        for task in tasks:
            with pytest.raises(NoEndpointError, match="failed its proof twice") as caught:
                await task
            assert not isinstance(caught.value, Outage)


# -- joining and leaving -------------------------------------------------------------------------


async def test_an_endpoint_added_while_requests_wait_is_given_its_weights_and_used():
    old = FakeEndpoint(version=V1, gated=True)
    async with FakeEndpoint() as new, pool_of(old, max_inflight=1) as pool:
        repair = repairer(pool)
        pool.set_repair(repair)
        tasks = [ask(pool, seed) for seed in range(5)]
        await old.until(lambda: len(old.requests) == 1)
        pool.add(new.url + "/")
        await new.until(lambda: len(new.requests) == 4)
        assert repair.repaired == [new.url]
        with pytest.raises(ValueError, match="already"):
            pool.add(new.url)
        with pytest.raises(ValueError, match="http"):
            pool.add("localhost:8000")
        await open_all(tasks, old)
        assert answered(tasks) == list(range(5))


async def test_a_removed_endpoint_finishes_what_it_has_and_gets_nothing_new():
    leaving, staying = servers(2, gated=True)
    async with pool_of(leaving, staying, max_inflight=2) as pool:
        tasks = [ask(pool, seed) for seed in range(8)]
        for server in (leaving, staying):
            await server.until(lambda server=server: len(server.requests) == 2)
        pool.remove(leaving.url)
        assert [endpoint.url for endpoint in pool.endpoints] == [leaving.url, staying.url]
        leaving.gates[0].set()
        staying.gated = False
        for gate in staying.gates:
            gate.set()
        await until(lambda: sum(task.done() for task in tasks) == 7)
        assert len(leaving.requests) == 2 and leaving.num_disconnected == 0
        leaving.gates[1].set()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert [endpoint.url for endpoint in pool.endpoints] == [staying.url]
        assert Counter(task.result().endpoint for task in tasks)[leaving.url] == 2
        assert len(leaving.requests) + len(staying.requests) == 8
        with pytest.raises(ValueError, match="no endpoint"):
            pool.remove(leaving.url)


async def test_the_last_one_removed_leaves_requests_waiting_for_the_next():
    (server,) = servers(1)
    async with pool_of(server) as pool:
        pool.set_repair(repairer(pool))
        pool.remove(server.url)
        assert pool.endpoints == []
        task = ask(pool, 0)
        await asyncio.sleep(0.2)
        assert not task.done()
        pool.add(server.url)
        assert (await asyncio.wait_for(task, 10)).token_ids[0] == 0


async def test_a_removed_endpoint_that_hangs_does_not_keep_its_requests():
    leaving, staying = servers(2, gated=True)
    async with pool_of(leaving, staying) as pool:
        tasks = [ask(pool, seed) for seed in range(4)]
        await leaving.until(lambda: len(leaving.requests) == 2)
        pool.remove(leaving.url)
        leaving.running.clear()
        await staying.until(lambda: len(staying.requests) == 4)
        await open_all(tasks, staying)
        assert answered(tasks) == list(range(4))
        assert [endpoint.url for endpoint in pool.endpoints] == [staying.url]


# -- everything at once --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_every_sample_is_answered_exactly_once_whatever_happens(seed, caplog):
    caplog.set_level(logging.CRITICAL)
    random = np.random.default_rng(seed)
    group = servers(3)
    async with pool_of(*group, max_inflight=4, max_retries=1000) as pool:
        pool.set_repair(repairer(pool))
        tasks: list[asyncio.Task[Completion]] = []
        for _ in range(40):
            tasks += [ask(pool, len(tasks) + n) for n in range(5)]
            await asyncio.sleep(0.01)
            await _make_trouble(pool, group[random.integers(3)], random)
        for server in group:
            server.faults.clear()
            server.running.set()
        if all(endpoint.leaving for endpoint in pool.endpoints):
            pool.add(group[0].url)
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
        assert answered(tasks) == list(range(200))
        assert {s.version for t in tasks for s in t.result().version_spans} == {V1}
        await until(lambda: all(not endpoint.attempts for endpoint in pool.endpoints))
        assert [e.num_inflight for e in pool.endpoints] == [0] * len(pool.endpoints)
        assert [e.outstanding_tokens for e in pool.endpoints] == [0] * len(pool.endpoints)
        assert [e.num_reserved for e in pool.endpoints] == [0] * len(pool.endpoints)


async def _make_trouble(
    pool: EndpointPool, server: FakeEndpoint, random: np.random.Generator
) -> None:
    match random.integers(7):
        case 0:
            await server.restart()
        case 1:
            server.running.clear()
            asyncio.get_running_loop().call_later(0.3 + random.random(), server.running.set)
        case 2:
            server.faults.extend([status(500, "EngineCore died"), truncate])
        case 3:
            server.faults.extend([break_off, status(429, "slow down")])
        case 4:
            if any(endpoint.url == server.url for endpoint in pool.endpoints):
                pool.remove(server.url)
            else:
                pool.add(server.url)
        case _:
            present = {endpoint.url for endpoint in pool.endpoints if not endpoint.leaving}
            if server.url not in present:
                pool.add(server.url)


async def test_a_prompt_that_is_refused_is_an_error_of_that_prompt_only():
    (server,) = servers(1)

    asked: list[list[int]] = []

    async def fetch(url: str, prompt: np.ndarray, *_: Any) -> Any:
        asked.append(prompt.tolist())
        if prompt.tolist() == PROMPT.tolist():
            raise PromptRejected(url, "400: this model's maximum context length is 2 tokens")

    async with pool_of(server, fetch=fetch) as pool:
        with pytest.raises(PromptRejected, match="maximum context"):
            await ask(pool, 0)
        assert pool.endpoints[0].is_up and pool.endpoints[0].num_failures == 0
        assert len(asked) == 4 and asked[0] == asked[2] == PROMPT.tolist()  # and the canary's
