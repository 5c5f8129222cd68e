"""The order of events of a push, against an endpoint whose every answer the test scripts."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from easyrl.inference_client.errors import EndpointError, EndpointUnavailable, RequestRejected
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.transfer.artifact import Chunk
from easyrl.weight_sync.delivery import (
    MOST_CHUNKS,
    Superseded,
    WeightPusher,
    WeightStream,
    while_up,
)

URL = "http://endpoint"
PUSH = ["init", "pause", "start", "update", "finish", "reset", "resume"]


class ScriptedClient:
    """``EndpointClient`` without a server: notes what is called; ``script`` may step in."""

    url = URL

    def __init__(self, script: dict[str, Callable[[], Awaitable[None]]] | None = None) -> None:
        self.script = script or {}
        self.calls: list[str] = []
        self.chunks: list[list[str]] = []  # files of each update
        self.version = "default"
        self.resets = True

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.script:
            await self.script[name]()

    async def weight_version(self, timeout_s=None) -> str:
        return self.version

    async def init_weight_transfer(self, init_info) -> None:
        assert init_info == {"to": URL}
        await self._called("init")

    async def pause(self, mode) -> None:
        assert mode == "wait"
        await self._called("pause")

    async def start_weight_update(self) -> None:
        await self._called("start")

    async def update_weights(self, update_info) -> None:
        assert update_info["artifact"] == "run-0-1"
        self.chunks.append([chunk["file"] for chunk in update_info["chunks"]])
        await self._called("update")

    async def abandon_weight_update(self) -> None:
        await self._called("abandon")
        raise RequestRejected(URL, "abandoned")  # as servers answer it

    async def finish_weight_update(self, version) -> None:
        await self._called("finish")
        self.version = version

    async def set_weight_version(self, version, timeout_s=None) -> None:
        await self._called("stamp")
        self.version = version

    async def reset_prefix_cache(self) -> bool:
        await self._called("reset")
        return self.resets

    async def resume(self) -> None:
        await self._called("resume")


class Announcer:
    async def init_info(self, url):
        return {"to": url}


def failing(*errors):
    """Raises each of ``errors`` once, then does nothing."""
    left = list(errors)

    async def step() -> None:
        if left:
            raise left.pop(0)

    return step


def chunk(number: int) -> Chunk:
    return Chunk(f"chunk-{number}", {f"weight-{number}": "00"}, 4)


def stream(num_chunks: int, *, complete: bool = True) -> WeightStream:
    weights = WeightStream("run-0-1", "run:0:1")
    for number in range(num_chunks):
        weights.add(chunk(number))
    if complete:
        weights.complete()
    return weights


def push(client, weights, wanted=lambda: True, pusher=None):
    pusher = pusher or WeightPusher(Announcer())
    return pusher.push(Endpoint(client, 1), weights, wanted)


def test_a_push_in_its_order():
    client = ScriptedClient()
    asyncio.run(push(client, stream(2)))
    assert client.calls == PUSH
    assert client.chunks == [["chunk-0", "chunk-1"]]
    assert client.version == "run:0:1"


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
        assert client.calls == ["init", "pause", "start", "update", "update", *PUSH[-3:]]

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


@pytest.mark.parametrize("broken", ["pause", "start", "update", "finish", "reset", "resume"])
def test_a_failure_leaves_the_endpoint_in_order(broken):
    error = EndpointUnavailable(URL, "out of luck")
    client = ScriptedClient({broken: failing(error, error)})
    with pytest.raises(EndpointUnavailable, match="out of luck"):
        asyncio.run(push(client, stream(1)))
    assert client.calls[-2:] == ["abandon", "resume"]


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


def test_a_repair_is_stamped_with_its_version_unless_the_endpoint_has_restarted():
    async def story():
        pusher, client = WeightPusher(Announcer()), ScriptedClient()
        endpoint = Endpoint(client, 1)
        await push(client, stream(1).unproven(), pusher=pusher)
        assert client.version == "run:0:1:unproven" and client.chunks == [["chunk-0"]]
        client.version = "default"
        with pytest.raises(EndpointError, match="has restarted"):
            await pusher.stamp(endpoint, "run:0:1", lambda: True)
        client.version = "run:0:1:unproven"
        with pytest.raises(Superseded):
            await pusher.stamp(endpoint, "run:0:1", lambda: False)
        assert "stamp" not in client.calls
        assert not await pusher.still_serves(endpoint, "run:0:1")
        await pusher.stamp(endpoint, "run:0:1", lambda: True)
        assert client.version == "run:0:1"
        assert await pusher.still_serves(endpoint, "run:0:1")

    asyncio.run(story())


def test_an_update_that_a_dead_trainer_left_open_is_given_up():
    client = ScriptedClient({"start": failing(RequestRejected(URL, "one is open"))})
    asyncio.run(push(client, stream(1)))
    assert client.calls == [*PUSH[:2], "start", "abandon", *PUSH[2:]]


def test_a_prefix_cache_that_is_not_reset_fails_the_push():
    client = ScriptedClient()
    client.resets = False
    with pytest.raises(EndpointError, match="prefix cache"):
        asyncio.run(push(client, stream(1)))


def test_what_is_wanted_no_longer_does_not_touch_the_endpoint():
    client = ScriptedClient()
    with pytest.raises(Superseded):
        asyncio.run(push(client, stream(1), wanted=lambda: False))
    assert client.calls == []


def test_a_push_that_is_overtaken_gives_up_before_the_next():
    async def story():
        gate, wanted = asyncio.Event(), [True]
        client = ScriptedClient({"update": gate.wait})
        pusher = WeightPusher(Announcer())
        old = asyncio.ensure_future(
            push(client, stream(MOST_CHUNKS + 1), lambda: wanted[0], pusher)
        )
        await until(lambda: bool(client.chunks))
        wanted[0] = False
        new = asyncio.ensure_future(push(client, stream(1), pusher=pusher))
        await asyncio.sleep(0.05)
        assert client.calls == PUSH[:4]  # the new one waits
        gate.set()
        with pytest.raises(Superseded):
            await old
        await new
        assert client.calls == [*PUSH[:4], "abandon", "resume", *PUSH]

    asyncio.run(story())


def test_an_endpoint_that_hangs_is_not_waited_for_once_it_is_found_down():
    async def story():
        client = ScriptedClient({"update": asyncio.Event().wait})
        endpoint = Endpoint(client, 1)
        work = WeightPusher(Announcer()).push(endpoint, stream(1), lambda: True)
        pushing = asyncio.ensure_future(while_up(endpoint, work))
        await until(lambda: bool(client.chunks))
        endpoint.down = "2 health probes unanswered"
        with pytest.raises(EndpointUnavailable, match="2 health probes unanswered"):
            await asyncio.wait_for(pushing, 5)
        await until(lambda: client.calls[-2:] == ["abandon", "resume"])

    asyncio.run(story())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)
