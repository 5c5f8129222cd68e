"""Weights by broadcast, with a stand-in for the group: NCCL and HCCL need devices.

The stand-in takes the tensors as vLLM's engine does, in a thread and one after another, and brings
them to embedded servers through their own routes for artefacts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from easyrl.inference_client.transfer.broadcast import EndpointsClient, WeightMeta
from easyrl.schema import PolicyVersion
from easyrl.weight_sync.broadcasting import (
    MOST_FAILURES,
    TeeClosed,
    TensorTee,
    address_towards_all,
)
from tests.easyrl.weight_sync.test_weight_repair import on_all, thread_collectives
from tests.easyrl.weight_sync.weight_sync_parts import (
    Hanging,
    PlainEngine,
    Restarting,
    Watched,
    serve,
    stamps,
    wait_until,
    weight_sync,
)
from tests.inference_client.written_artifact import write_artifact

V = [PolicyVersion("sync", 0, number) for number in range(5)]
PROBE0 = "sync:0:0:probe"
STAMP = "/update_weight_version"
SENT_BY_ARTEFACT = [
    *("/pause", STAMP, "/start_weight_update", "/update_weights", "/finish_weight_update"),
]
RESUMED = ["/reset_prefix_cache", "/resume"]


class Groups:
    """Opens groups, remembers them, and has them go wrong."""

    def __init__(self, root: Path) -> None:
        self.root = root / "easyrl-sync"  # where the endpoints know how to read
        self.opened: list[FakeGroup] = []
        self.closed: list[FakeGroup] = []
        self.metadata: list[WeightMeta] = []
        self.refuses: Exception | None = None
        self.midway: Callable[[FakeGroup, int], None] = lambda group, number: None
        self.falsify: Callable[[Tensor], Tensor] = lambda weight: weight

    def open(self, urls: Sequence[str], metadata: Sequence[WeightMeta]) -> FakeGroup:
        if self.refuses is not None:
            raise self.refuses
        self.metadata = list(metadata)
        self.opened.append(FakeGroup(self, urls))
        return self.opened[-1]


class FakeGroup:
    def __init__(self, groups: Groups, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        self.sent: list[str] = []
        self.aborted = threading.Event()
        self._groups = groups
        self._client = EndpointsClient(urls, None, 600.0)

    def send(self, version: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._client.start_weight_update()
        directory = self._groups.root / f"broadcast-{version.replace(':', '-')}"
        artifact = write_artifact(self._on_the_way(tensors), directory, version, 2**20)
        self._client.update_weights(artifact.update_info())
        self._client.finish_weight_update(version)
        artifact.remove()
        self.sent.append(version.removesuffix(":updating"))

    def close(self) -> None:
        self.aborted.set()
        self._client.close()
        self._groups.closed.append(self)

    def _on_the_way(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for number, (name, weight) in enumerate(tensors):
            meta = self._groups.metadata[number]
            assert (meta.name, meta.dtype, meta.shape) == (name, weight.dtype, tuple(weight.shape))
            self._groups.midway(self, number)
            yield name, self._groups.falsify(weight)


class CountingEngine(PlainEngine):
    """Says how many whole passes over the weights were made."""

    num_passes = 0

    def named_weights(self, kind="full"):
        yield from super().named_weights()
        self.num_passes += 1


@pytest.fixture
def groups(tmp_path):
    return Groups(tmp_path)


@pytest.fixture
def open_sync(model_dir, tmp_path, groups):
    with ExitStack() as opened:

        def open_it(urls, engine=None, **options):
            engine = engine or PlainEngine(model_dir)
            given = {"transport": "nccl", "open_group": groups.open} | options
            return opened.enter_context(weight_sync(engine, urls, tmp_path, **given))

        yield open_it


# ---- as it should be -----------------------------------------------------------------------------


def test_a_version_is_broadcast_between_pause_and_resume(model_dir, server, groups, open_sync):
    engine = CountingEngine(model_dir)
    with closing(Watched(server)) as proxy:
        rank = open_sync([proxy.url], engine)
        assert rank.sync.publish(V[0]).metrics["sync/broadcast"] == 1
        shown = (*SENT_BY_ARTEFACT, *RESUMED, "/collective_rpc")
        seen = [path for path in proxy.seen if path in shown]
        # proved, then told that it was right beside the reset, in whatever order these arrive;
        # resumed, stamped, and asked whether it has restarted before the stamp
        rpc, (reset, resume) = "/collective_rpc", RESUMED
        ways = [
            [*SENT_BY_ARTEFACT, rpc, *beside, resume, STAMP, rpc]
            for beside in ((rpc, reset), (reset, rpc))
        ]
        half = len(ways[0])
        # the probe by artefact, then the weights in one piece
        assert len(seen) == 2 * half and seen[:half] in ways and seen[half:] in ways
        assert len(proxy.inits) == 1  # the announcement, without which no proof
        assert engine.num_passes == 2
        engine.train(1e-7)  # only the proof would notice
        assert rank.sync.publish(V[1]).metrics["sync/broadcast"] == 1
        assert rank.statuses() == {proxy.url: "confirmed sync:0:1"}
        assert proxy.given == [PROBE0, "sync:0:0", "sync:0:1"]
        assert [group.sent for group in groups.opened] == [["sync:0:0", "sync:0:1"]]
        assert engine.num_passes == 3
        assert stamps(rank.generate("sync:0:1").result(60)) == {"sync:0:1"}
        assert not groups.closed
        rank.sync.close()
        assert groups.closed == groups.opened


def test_without_a_probe_the_first_version_tells_the_shapes(server, groups, open_sync):
    rank = open_sync([server], probe=False)
    assert rank.sync.publish(V[0]).metrics["sync/broadcast"] == 0
    assert not groups.opened
    assert rank.sync.publish(V[1]).metrics["sync/broadcast"] == 1
    assert groups.opened[0].sent == ["sync:0:1"]


def test_the_group_follows_the_endpoints(model_dir, server, second_server, groups, open_sync):
    """One joins, then one restarts under its URL, then one leaves."""
    with closing(Restarting(second_server)) as proxy:
        rank = open_sync([server])
        rank.sync.publish(V[0])
        rank.add(proxy.url)
        wait_until(lambda: rank.statuses()[proxy.url] == "confirmed sync:0:0")  # by artefact
        assert rank.sync.publish(V[1]).metrics["sync/broadcast"] == 2
        with serve(model_dir) as restarted:
            proxy.move_to(restarted)
            wait_until(lambda: proxy.given[-2:] == [PROBE0, "sync:0:1"])
            wait_until(lambda: rank.statuses()[proxy.url] == "confirmed sync:0:1")
            assert rank.sync.publish(V[2]).metrics["sync/broadcast"] == 2

            async def remove() -> None:
                rank.pool.remove(proxy.url)

            rank.thread.run(remove())
            assert rank.sync.publish(V[3]).metrics["sync/broadcast"] == 1
        found = [(set(group.urls), group.sent) for group in groups.opened]
        both = {server, proxy.url}
        assert found == [
            ({server}, ["sync:0:0"]),
            (both, ["sync:0:1"]),
            (both, ["sync:0:2"]),
            ({server}, ["sync:0:3"]),
        ]
        assert groups.closed == groups.opened[:-1]


def test_two_ranks_make_the_same_passes(model_dir, tmp_path, server, second_server, groups):
    engines = [CountingEngine(model_dir), CountingEngine(model_dir)]
    urls = [server, second_server]
    with ExitStack() as opened:
        ranks = [
            opened.enter_context(
                weight_sync(
                    *(engine, urls, tmp_path),
                    collectives=collectives,
                    transport="nccl",
                    open_group=groups.open,
                )
            )
            for engine, collectives in zip(engines, thread_collectives(), strict=True)
        ]

        def fail(group: FakeGroup, number: int) -> None:
            if group.sent:
                raise RuntimeError("NCCL is out of luck")

        groups.midway = fail
        for version, num_passes in zip(V[:3], (2, 3, 4), strict=True):
            outcomes = on_all(lambda rank, version=version: rank.sync.publish(version), ranks)
            assert outcomes[0].metrics["sync/broadcast"] == (0 if version is V[1] else 2)
            for rank in ranks:
                assert set(rank.statuses().values()) == {f"confirmed {version}"}
            assert [engine.num_passes for engine in engines] == [num_passes] * 2
        assert [group.sent for group in groups.opened] == [["sync:0:0"], ["sync:0:2"]]


# ---- what goes wrong -----------------------------------------------------------------------------


def hang(group: FakeGroup, number: int) -> None:
    if number == 1:
        assert group.aborted.wait(60)
        raise RuntimeError("aborted")


def fail(group: FakeGroup, number: int) -> None:
    if number == 1:
        raise RuntimeError("NCCL is out of luck")


@pytest.mark.parametrize(
    ("midway", "message"),
    [(fail, "NCCL is out of luck"), (hang, "weight_sync.timeout_s")],
    ids=["fails", "hangs"],
)
def test_what_a_broadcast_leaves_half_done_goes_by_artefact(
    midway, message, server, second_server, groups, open_sync, caplog
):
    groups.midway = midway
    with closing(Watched(server)) as proxy:
        rank = open_sync([proxy.url, second_server], timeout_s=1.0)
        metrics = rank.sync.publish(V[0]).metrics
        assert metrics["sync/broadcast"] == 0 and metrics["sync/endpoints"] == 2
        assert set(rank.statuses().values()) == {"confirmed sync:0:0"}
        assert message in caplog.text
        assert proxy.given == [PROBE0, "sync:0:0"]  # the probe was not needed again
        wait_until(lambda: groups.closed == groups.opened)
        groups.midway = lambda group, number: None
        assert rank.sync.publish(V[1]).metrics["sync/broadcast"] == 2
        assert len(groups.opened) == 2


def test_after_some_failures_nothing_is_broadcast_any_more(server, groups, open_sync, caplog):
    groups.refuses = ValueError("the servers know no such group")
    rank = open_sync([server], canary=False)
    for number, version in enumerate(V):
        assert rank.sync.publish(version).metrics["sync/broadcast"] == 0
        assert rank.statuses() == {server: f"confirmed {version}"}
        failures = min(number + 1, MOST_FAILURES)
        assert caplog.text.count("the servers know no such group") == failures
        assert ("no more broadcasts" in caplog.text) == (failures == MOST_FAILURES)


def test_failures_with_a_success_in_between_do_not_add_up(server, groups, open_sync, caplog):
    rank = open_sync([server], canary=False)
    for number, version in enumerate(V):
        works = number == MOST_FAILURES - 1
        groups.midway = (lambda group, number: None) if works else fail
        assert rank.sync.publish(version).metrics["sync/broadcast"] == int(works)
    assert caplog.text.count("NCCL is out of luck") == len(V) - 1 > MOST_FAILURES
    assert "no more broadcasts" not in caplog.text


def test_an_endpoint_that_goes_down_in_a_broadcast_holds_nobody_up(
    server, second_server, groups, open_sync, caplog
):
    groups.midway = hang
    with closing(Hanging(server)) as proxy:
        rank = open_sync([proxy.url, second_server], probe_timeout_s=0.2)

        def hang_with_it(group: FakeGroup, number: int) -> None:
            proxy.hangs = proxy.url in group.urls
            hang(group, number)

        groups.midway = hang_with_it
        metrics = rank.sync.publish(V[0]).metrics
        assert f"{proxy.url} went down in it" in caplog.text
        assert metrics["sync/endpoints"] == 1
        assert rank.statuses()[second_server] == "confirmed sync:0:0"
        proxy.hangs = False
        wait_until(lambda: rank.statuses()[proxy.url] == "confirmed sync:0:0")


def test_wrong_bits_are_seen_by_the_proof_and_pushed_again(server, groups, open_sync, caplog):
    groups.falsify = lambda weight: torch.nextafter(weight, torch.tensor(9.0))
    rank = open_sync([server])
    metrics = rank.sync.publish(V[0]).metrics
    assert "serves other weights than version sync:0:0" in caplog.text
    assert rank.statuses() == {server: "confirmed sync:0:0"}
    assert metrics["sync/endpoints"] == 1


def test_a_host_copy_that_cannot_be_written_ends_the_sync(model_dir, server, groups, open_sync):
    class Breaks(PlainEngine):
        breaks = False

        def named_weights(self, kind="full"):
            for number, item in enumerate(super().named_weights()):
                if self.breaks and number == 2:
                    raise OSError("disk full")
                yield item

    engine = Breaks(model_dir)
    rank = open_sync([server], engine)
    rank.sync.publish(V[0])
    engine.breaks = True
    with pytest.raises(OSError, match="disk full"):
        rank.sync.publish(V[1])
    wait_until(lambda: groups.closed == groups.opened)


@pytest.mark.parametrize(("transport", "package"), [("nccl", "vllm"), ("hccl", "vllm_ascend")])
def test_a_missing_package_is_named_at_the_start(transport, package, server, open_sync):
    message = f"weight_sync.transport: {transport} needs the package {package}"
    with pytest.raises(ValueError, match=message):
        open_sync([server], transport=transport, open_group=None)


# ---- parts ---------------------------------------------------------------------------------------


def tensors(count: int = 4) -> Iterator[tuple[str, Tensor]]:
    """Each valid until the next one only."""
    buffer = torch.empty(2)
    for number in range(count):
        yield f"w{number}", buffer.fill_(number)


def test_a_tee_gives_copies_of_all() -> None:
    tee, taken = TensorTee(), {}

    def take() -> None:
        taken.update(tee.copies(torch.device("cpu")))

    sender = threading.Thread(target=take)
    sender.start()
    passed = [(name, weight.tolist()) for name, weight in tee.pass_on(tensors())]
    sender.join(10)
    assert passed == [(name, weight.tolist()) for name, weight in taken.items()]
    assert passed[3] == ("w3", [3.0, 3.0])


def test_a_closed_tee_holds_nobody_up() -> None:
    tee = TensorTee()
    passing = tee.pass_on(tensors())
    copies = tee.copies(torch.device("cpu"))
    next(passing)
    assert next(copies)[0] == "w0"
    tee.close()
    assert len(list(passing)) == 3
    tee = TensorTee()
    tee.close()
    with pytest.raises(TeeClosed):
        next(tee.copies(torch.device("cpu")))


def test_the_trainer_is_found_by_all() -> None:
    assert address_towards_all(["http://127.0.0.1:8000", "http://localhost:8001"]) == "127.0.0.1"
