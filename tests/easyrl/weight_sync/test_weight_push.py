"""The order of events of a push, against an endpoint whose every answer the test scripts."""

import asyncio

import pytest

from easyrl.inference_client.errors import EndpointError, EndpointUnavailable, RequestRejected
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.weight_sync.push import WeightPusher, while_up
from easyrl.weight_sync.target import MOST_CHUNKS
from tests.easyrl.weight_sync.scripted_endpoint import (
    PUSH,
    UPDATING,
    URL,
    VERSION,
    Announcer,
    ScriptedClient,
    chunk,
    failing,
    stream,
    until,
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("easyrl.weight_sync.push.RETRY_PAUSES_S", (0.001,) * 4)


def push(client, weights, pusher=None):
    pusher = pusher or WeightPusher(Announcer())
    return pusher.push(Endpoint(client, 1), weights)


def test_a_push_in_its_order():
    client = ScriptedClient()
    asyncio.run(push(client, stream(2)))
    assert client.calls == PUSH
    assert client.chunks == [["chunk-0", "chunk-1"]]
    assert client.version == UPDATING


def test_chunks_go_while_the_next_ones_are_written():
    async def story():
        weights = stream(1, complete=False)
        client = ScriptedClient()
        pushing = asyncio.ensure_future(push(client, weights))
        await until(lambda: client.chunks == [["chunk-0"]])
        assert "finish" not in client.calls
        weights.add(chunk(1))
        weights.add(chunk(2))  # written since: they go together
        await until(lambda: client.chunks == [["chunk-0"], ["chunk-1", "chunk-2"]])
        weights.complete()
        await pushing
        assert client.calls == [*PUSH[:5], "update", PUSH[-1]]

    asyncio.run(story())


def test_an_endpoint_that_is_slow_gets_what_was_written_since():
    async def story():
        gate = asyncio.Event()
        weights = stream(1, complete=False)
        slow, fast = ScriptedClient({"update": gate.wait}), ScriptedClient()
        pushes = [asyncio.ensure_future(push(client, weights)) for client in (slow, fast)]
        await until(lambda: fast.chunks and slow.chunks)
        for number in (1, 2):
            weights.add(chunk(number))
            await until(lambda n=number: len(fast.chunks) == n + 1)
        gate.set()
        weights.complete()
        await asyncio.gather(*pushes)
        assert fast.chunks == [["chunk-0"], ["chunk-1"], ["chunk-2"]]
        assert slow.chunks == [["chunk-0"], ["chunk-1", "chunk-2"]]

    asyncio.run(story())


def test_a_finished_artefact_goes_in_few_requests():
    client = ScriptedClient()
    asyncio.run(push(client, stream(2 * MOST_CHUNKS + 1)))
    assert [len(files) for files in client.chunks] == [MOST_CHUNKS, MOST_CHUNKS, 1]
    assert len(set(sum(client.chunks, []))) == 2 * MOST_CHUNKS + 1


@pytest.mark.parametrize("broken", PUSH[1:])
def test_a_failure_leaves_the_endpoint_in_order(broken):
    error = EndpointUnavailable(URL, "out of luck")
    client = ScriptedClient({broken: failing(error, error)})
    with pytest.raises(EndpointUnavailable, match="out of luck"):
        asyncio.run(push(client, stream(1)))
    assert client.calls[-2:] == ["abandon", "resume"]
    # nothing puts the old weights back: from the first chunk on, no stamp that requests ask for
    touched = client.calls.index("start") if "start" in client.calls else len(client.calls)
    assert {stamp for _, stamp in client.stamps[touched:]} <= {UPDATING}


def test_a_resume_after_a_failure_is_asked_for_again_while_the_endpoint_does_not_answer():
    lost = [EndpointUnavailable(URL, "connection lost")] * 2
    client = ScriptedClient(
        {"update": failing(EndpointError(URL, "out of luck")), "resume": failing(*lost)}
    )
    with pytest.raises(EndpointError, match="out of luck"):
        asyncio.run(push(client, stream(1)))
    assert client.calls[-4:] == ["abandon", "resume", "resume", "resume"]


def test_one_that_may_stay_paused_is_named_in_the_log(caplog):
    lost = [EndpointUnavailable(URL, "connection lost")] * 9
    client = ScriptedClient(
        {"update": failing(EndpointError(URL, "out of luck")), "resume": failing(*lost)}
    )
    with pytest.raises(EndpointError, match="out of luck"):
        asyncio.run(push(client, stream(1)))
    assert f"{URL}: may stay paused" in caplog.text and "connection lost" in caplog.text


def test_an_endpoint_is_told_where_the_weights_are_once_and_again_after_a_failure():
    async def story():
        pusher = WeightPusher(Announcer())
        client = ScriptedClient()
        await push(client, stream(1), pusher=pusher)
        await push(client, stream(1), pusher=pusher)
        assert client.calls == PUSH + PUSH[1:]
        client.script["update"] = failing(EndpointError(URL, "no"))
        with pytest.raises(EndpointError):
            await push(client, stream(1), pusher=pusher)
        client.calls.clear()
        await push(client, stream(1), pusher=pusher)
        assert client.calls == PUSH
        client.calls.clear()
        client.version = "default"  # it has restarted
        assert await pusher.has_restarted(Endpoint(client, 1))
        await push(client, stream(1), pusher=pusher)
        assert client.calls == PUSH
        assert not await pusher.has_restarted(Endpoint(client, 1))

    asyncio.run(story())


def test_a_version_is_stamped_unless_the_endpoint_has_restarted():
    async def story():
        pusher, client = WeightPusher(Announcer()), ScriptedClient()
        endpoint, weights = Endpoint(client, 1), stream(1)
        await push(client, weights, pusher=pusher)
        assert await pusher.stamp_of(endpoint, weights) == UPDATING
        client.version = "default"
        assert await pusher.stamp_of(endpoint, weights) is None
        with pytest.raises(EndpointError, match="has restarted"):
            await pusher.stamp(endpoint, VERSION)
        assert client.version == "default"
        client.version = "other-0f:0:7:probe:updating"
        with pytest.raises(EndpointError, match=r"another run \(other-0f\) has given") as told:
            await pusher.stamp(endpoint, VERSION)
        assert "restarted" not in told.value.reason
        client.version = UPDATING
        await pusher.stamp(endpoint, VERSION)
        await pusher.check_start(endpoint)
        assert client.version == VERSION and client.calls[-2:] == ["stamp", "ask"]
        assert await pusher.stamp_of(endpoint, weights) == VERSION

    asyncio.run(story())


@pytest.mark.parametrize(("stamped", "left"), [(True, UPDATING), (False, "default")])
def test_who_failed_keeps_no_stamp_that_requests_ask_for(stamped, left):
    async def story():
        pusher, client, weights = WeightPusher(Announcer()), ScriptedClient(), stream(1)
        endpoint = Endpoint(client, 1)
        if stamped:
            await push(client, weights, pusher=pusher)
            await pusher.stamp(endpoint, VERSION)
        await pusher.disown(endpoint, weights)
        assert client.version == left
        assert await pusher.stamp_of(endpoint, weights) is None
        assert await pusher.has_restarted(endpoint)

    asyncio.run(story())


@pytest.mark.parametrize("abandoned", [True, False], ids=["answered", "connection-lost"])
def test_an_update_that_a_dead_trainer_left_open_is_given_up(abandoned):
    """Whether the answer to that comes or not."""
    script = {"start": failing(RequestRejected(URL, "one is open"))}
    if not abandoned:
        script["abandon"] = failing(EndpointUnavailable(URL, "disconnected"))
    client = ScriptedClient(script)
    asyncio.run(push(client, stream(1)))
    assert client.calls == [*PUSH[:4], "abandon", *PUSH[3:]]


def resume(client):
    return WeightPusher(Announcer()).resume(Endpoint(client, 1), None)


def test_an_endpoint_with_a_prefix_cache_that_is_not_reset_does_not_go_on():
    client = ScriptedClient()
    client.resets = False
    with pytest.raises(EndpointError, match="prefix cache"):
        asyncio.run(resume(client))
    assert "resume" not in client.calls


def test_blocks_that_are_in_use_for_a_moment_are_waited_for():
    """As while a KV connector moves them out."""
    client, left = ScriptedClient(), [False, False]
    answers = client.reset_prefix_cache

    async def reset() -> bool:
        await answers()
        return left.pop() if left else True

    client.reset_prefix_cache = reset
    asyncio.run(resume(client))
    assert client.calls == ["reset", "reset", "reset", "resume"]


def test_an_update_says_whether_its_proof_follows():
    async def story():
        for proof_follows in (False, True):
            client = ScriptedClient()
            pusher = WeightPusher(Announcer(), proof_follows=proof_follows)
            await push(client, stream(MOST_CHUNKS + 1), pusher=pusher)
            assert client.proofs_follow == [proof_follows] * 2

    asyncio.run(story())


def test_an_endpoint_that_hangs_is_not_waited_for_once_it_is_found_down():
    async def story():
        client = ScriptedClient({"update": asyncio.Event().wait})
        endpoint = Endpoint(client, 1)
        work = WeightPusher(Announcer()).push(endpoint, stream(1))
        pushing = asyncio.ensure_future(while_up(endpoint, work))
        await until(lambda: bool(client.chunks))
        endpoint.down = "2 health probes unanswered"
        with pytest.raises(EndpointUnavailable, match="2 health probes unanswered"):
            await asyncio.wait_for(pushing, 5)
        await until(lambda: client.calls[-2:] == ["abandon", "resume"])

    asyncio.run(story())
