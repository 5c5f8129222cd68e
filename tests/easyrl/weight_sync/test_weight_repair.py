"""Endpoints that come, go and come back between two syncs, or in the middle of one."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import orjson
import pytest

from easyrl.inference_client.errors import EndpointUnavailable, Outage
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.schema import (
    TEMPORARY_FAILURE,
    InterruptedRun,
    NoEndpointServes,
    PolicyVersion,
    StopRequested,
)
from easyrl.weight_sync.target import Target
from tests.easyrl.weight_sync.weight_sync_parts import (
    NOWHERE,
    PROVE,
    DamagesArtefacts,
    Dripping,
    Hanging,
    HangsAt,
    MissesUpdates,
    PlainEngine,
    Restarting,
    Watched,
    serve,
    stamps,
    wait_until,
    weight_sync,
)
from tests.end_to_end.proxy import reply

V0, V1, V2, V3 = (PolicyVersion("sync", 0, v) for v in range(4))
PROBE0 = "sync:0:0:probe"


# ---- in the middle of a batch --------------------------------------------------------------------


@pytest.mark.parametrize("probe", [True, False])
def test_a_restart_in_mid_batch_is_repaired(probe, model_dir, second_server, tmp_path):
    engine = PlainEngine(model_dir)
    engine.train(1e-1)
    with ExitStack() as opened:
        first = opened.enter_context(ExitStack())
        proxy = opened.enter_context(closing(Restarting(first.enter_context(serve(model_dir)))))
        opened.callback(proxy.released.set)
        rank = opened.enter_context(weight_sync(engine, [proxy.url], tmp_path, probe=probe))
        rank.sync.publish(V0)
        proxy.released.clear()
        pending = rank.generate(str(V0))
        wait_until(lambda: proxy.num_waiting == 1)
        first.close()
        proxy.move_to(second_server)
        proxy.released.set()
        assert stamps(pending.result(60)) == {str(V0)}
        assert rank.statuses() == {proxy.url: "confirmed sync:0:0"}
        probes = [PROBE0] if probe else []
        given = [*probes, "sync:0:0", *probes, "sync:0:0"]
        assert proxy.given == given
        assert engine.num_probes == int(probe)  # in mid-batch without the trainer
        assert rank.sync.publish(V1).metrics["sync/canary_mean"] < 1e-5
        assert proxy.given == [*given, "sync:0:1"]


def test_an_endpoint_that_comes_in_mid_batch_is_proved_and_used(
    model_dir, server, second_server, tmp_path
):
    engine = PlainEngine(model_dir)
    with closing(Watched(second_server)) as proxy:
        with weight_sync(engine, [server], tmp_path) as rank:
            rank.sync.publish(V0)
            rank.add(proxy.url)
            wait_until(lambda: rank.statuses()[proxy.url] == "confirmed sync:0:0")
            assert proxy.given == [PROBE0, "sync:0:0"]
            rank.sync.publish(V1)
            assert set(rank.statuses().values()) == {"confirmed sync:0:1"}
            assert proxy.given == [PROBE0, "sync:0:0", "sync:0:1"]
            assert engine.num_probes == 1


@pytest.mark.parametrize(
    ("first", "message"),
    [(0, "with the probe's weights, canary"), (1, "canary: log-probabilities differ")],
    ids=["keeps-its-own", "keeps-the-probe"],
)
def test_a_liar_that_comes_in_mid_batch_is_excluded(
    first, message, model_dir, server, second_server, tmp_path
):
    engine = PlainEngine(model_dir)
    engine.train(1e-1)
    with closing(MissesUpdates(second_server, lies=True, first=first)) as proxy:
        with weight_sync(engine, [server], tmp_path) as rank:
            rank.sync.publish(V0)
            rank.add(proxy.url)
            wait_until(lambda: message in rank.statuses()[proxy.url])
            assert rank.statuses()[server] == "confirmed sync:0:0"


def test_an_endpoint_that_was_only_away_proves_its_weights_again(model_dir, server, tmp_path):
    with closing(Restarting(server)) as proxy:
        with weight_sync(PlainEngine(model_dir), [proxy.url], tmp_path) as rank:
            rank.sync.publish(V0)
            num_proofs = proxy.seen.count(PROVE)
            proxy.move_to(NOWHERE)
            wait_until(lambda: "confirmed" not in rank.statuses()[proxy.url])
            proxy.move_to(server)
            wait_until(lambda: rank.statuses()[proxy.url] == "confirmed sync:0:0")
            assert proxy.given == [PROBE0, "sync:0:0"]
            assert proxy.seen.count(PROVE) == num_proofs + 1


class WrongWhenItReturns(Restarting):
    """Its weights are not what they were when it comes back, until they are pushed again."""

    wrong = False

    async def answer(self, request, body):
        if request.path == "/start_weight_update":
            self.wrong = False
        if request.path == PROVE and self.wrong:
            proof = {"slices": {}, "problems": {"lm_head.weight": "a flipped bit"}}
            return reply({"results": [proof | {"transport": "file"}]})
        return await super().answer(request, body)


def test_a_proof_that_fails_in_mid_batch_is_told_with_what_it_puts_in_doubt(
    model_dir, server, tmp_path
):
    told = []
    with closing(WrongWhenItReturns(server)) as proxy:
        with weight_sync(PlainEngine(model_dir), [proxy.url], tmp_path) as rank:
            rank.sync.confirmed.on_failed_proof = lambda *about: told.append(about)
            rank.sync.publish(V0)
            assert rank.generate(str(V0)).result(60).proof == 1
            proxy.move_to(NOWHERE)
            wait_until(lambda: "confirmed" not in rank.statuses()[proxy.url])
            proxy.wrong = True
            proxy.move_to(server)
            wait_until(lambda: rank.statuses()[proxy.url] == "confirmed sync:0:0")
            assert told == [(proxy.url, 1)]
            assert proxy.given == [PROBE0, "sync:0:0", PROBE0, "sync:0:0"]
            assert rank.generate(str(V0)).result(60).proof == 2
            rank.sync.publish(V1)
            assert rank.generate(str(V1)).result(60).proof == 3
            assert len(told) == 1


# ---- in the middle of a sync ---------------------------------------------------------------------


def test_an_endpoint_that_is_down_is_not_waited_for_and_repaired_in_the_same_batch(
    model_dir, server, second_server, tmp_path
):
    with closing(Restarting(second_server)) as proxy:
        with weight_sync(PlainEngine(model_dir), [server, proxy.url], tmp_path) as rank:
            rank.sync.publish(V0)
            proxy.move_to(NOWHERE)
            metrics = rank.sync.publish(V1).metrics
            assert metrics["sync/endpoints"] == 1
            assert rank.statuses()[server] == "confirmed sync:0:1"
            assert "confirmed" not in rank.statuses()[proxy.url]
            assert stamps(rank.generate(str(V1)).result(60)) == {str(V1)}
            proxy.move_to(second_server)
            wait_until(lambda: rank.statuses()[proxy.url] == "confirmed sync:0:1")
            # it had only been away: what it showed of the probe counts
            assert proxy.given == [PROBE0, "sync:0:0", "sync:0:1"]


@pytest.mark.parametrize("at", ["/update_weights", "/collective_rpc"])
def test_an_endpoint_that_hangs_in_the_middle_is_not_waited_for(
    at, model_dir, server, second_server, tmp_path
):
    options = {"probe": False, "probe_timeout_s": 1.5}
    with closing(Hanging(second_server)) as proxy:
        with weight_sync(PlainEngine(model_dir), [server, proxy.url], tmp_path, **options) as rank:
            rank.sync.publish(V0)
            proxy.at = at
            start_s = time.monotonic()
            metrics = rank.sync.publish(V1).metrics
            assert time.monotonic() - start_s < 30  # of weight_sync.timeout_s, 600
            assert metrics["sync/endpoints"] == 1
            assert "unanswered" in rank.statuses()[proxy.url]
            proxy.hangs = False
            wait_until(lambda: rank.statuses()[proxy.url] == "confirmed sync:0:1")


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/collective_rpc"])
def test_an_endpoint_that_never_answers_one_route_costs_one_time_out(
    path, model_dir, server, second_server, tmp_path, monkeypatch
):
    """Not two pushes of several requests each, while all others wait."""
    monkeypatch.setattr("easyrl.weight_sync.push.GIVING_UP_S", 0.2)
    options = {"probe": False, "timeout_s": 1.5}
    with closing(HangsAt(second_server)) as proxy:
        with weight_sync(PlainEngine(model_dir), [server, proxy.url], tmp_path, **options) as rank:
            rank.sync.publish(V0)
            proxy.path = path
            proxy.seen.clear()
            assert rank.sync.publish(V1).metrics["sync/endpoints"] == 1
            assert f"{path} was not answered within 1.5 s" in rank.statuses()[proxy.url]
            assert proxy.seen.count("/start_weight_update") == 1


def test_an_endpoint_that_is_slow_with_every_answer_is_left_to_mid_batch(
    model_dir, server, second_server, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("easyrl.weight_sync.delivery.GIVING_UP_S", 0.0)
    options = {"probe": False}
    with closing(Dripping(second_server)) as proxy:
        with weight_sync(PlainEngine(model_dir), [server, proxy.url], tmp_path, **options) as rank:
            rank.sync.publish(V0)
            rank.sync._reconciler.timeout_s = 0.5  # each of its answers has much longer
            proxy.late_s = 0.1
            assert rank.sync.publish(V1).metrics["sync/endpoints"] == 1
            assert rank.statuses()[server] == "confirmed sync:0:1"
            wait_until(lambda: rank.statuses()[proxy.url] == "confirmed sync:0:1")
            num_told = caplog.text.count("is late")
            assert rank.sync.publish(V2).metrics["sync/endpoints"] == 1
            proxy.late_s = 0.0
            wait_until(lambda: rank.statuses()[proxy.url] == "confirmed sync:0:2")
            assert caplog.text.count("is late") == num_told > 0  # nobody waited for it again
            assert rank.sync.publish(V3).metrics["sync/endpoints"] == 2


def test_all_down_is_waited_out(model_dir, server, second_server, tmp_path):
    engine = PlainEngine(model_dir)
    with closing(Restarting(server)) as proxy:
        with weight_sync(engine, [proxy.url], tmp_path) as rank:
            rank.sync.publish(V0)
            proxy.move_to(NOWHERE)
            timer = threading.Timer(1.5, proxy.move_to, [second_server])
            timer.start()
            rank.sync.publish(V1)  # the other server has to show the probe's change
            timer.join()
            assert rank.statuses() == {proxy.url: "confirmed sync:0:1"}
            assert proxy.given == [PROBE0, "sync:0:0", PROBE0, "sync:0:1"]
            assert engine.num_probes == 1


def test_an_outage_ends_after_its_limit(model_dir, server, tmp_path):
    options = {"probe": False, "max_outage_s": 0.5}
    with closing(Restarting(server)) as proxy:
        with weight_sync(PlainEngine(model_dir), [proxy.url], tmp_path, **options) as rank:
            rank.sync.publish(V0)
            proxy.move_to(NOWHERE)
            with pytest.raises(Outage, match=proxy.url):
                rank.sync.publish(V1)


def test_a_stop_ends_the_waiting_for_an_endpoint(model_dir, server, tmp_path):
    with closing(Restarting(server)) as proxy:
        with weight_sync(PlainEngine(model_dir), [proxy.url], tmp_path, probe=False) as rank:
            rank.sync.publish(V0)
            proxy.move_to(NOWHERE)
            timer = threading.Timer(0.5, rank.sync.stop.request, ["SIGTERM"])
            timer.start()
            with pytest.raises(StopRequested, match="SIGTERM"):
                rank.sync.publish(V1)
            timer.join()


# ---- two ranks -----------------------------------------------------------------------------------


class ThreadCollectives(Collectives):
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, values: list, barrier: threading.Barrier) -> None:
        super().__init__(Ranks.data_parallel())
        self.ranks = Ranks.data_parallel(rank, len(values))
        self._values, self._barrier = values, barrier

    def all_gather(self, value):
        self._values[self.ranks.rank] = orjson.dumps(value)
        self._barrier.wait(60)
        found = [orjson.loads(value) for value in self._values]
        self._barrier.wait(60)
        return found


def thread_collectives(num_ranks: int = 2) -> list[ThreadCollectives]:
    values, barrier = [None] * num_ranks, threading.Barrier(num_ranks)
    return [ThreadCollectives(rank, values, barrier) for rank in range(num_ranks)]


def on_all(work, ranks) -> list:
    """``work`` on every rank at once; results or exceptions."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        running = [threads.submit(work, rank) for rank in ranks]
        return [future.exception() or future.result() for future in running]


@pytest.fixture
def open_ranks(model_dir, tmp_path):
    """Two ranks over the same URLs, the second without endpoints of its own accord."""
    with ExitStack() as opened:

        def open_them(urls, **options):
            return [
                opened.enter_context(
                    weight_sync(
                        PlainEngine(model_dir), urls, tmp_path, collectives=collectives, **options
                    )
                )
                for collectives in thread_collectives()
            ]

        yield open_them


def test_all_ranks_confirm_what_rank_zero_has_proved(open_ranks, server, second_server):
    with closing(Watched(server)) as proxy:
        ranks = open_ranks([proxy.url, second_server])
        on_all(lambda rank: rank.sync.publish(V0), ranks)
        for rank in ranks:
            assert set(rank.statuses().values()) == {"confirmed sync:0:0"}
        assert proxy.given == [PROBE0, "sync:0:0"]  # from one rank only


def test_a_rank_that_does_not_know_an_endpoint_goes_on(open_ranks, server, second_server):
    ranks = open_ranks([server])
    on_all(lambda rank: rank.sync.publish(V0), ranks)
    ranks[0].add(second_server)
    wait_until(lambda: ranks[0].statuses()[second_server] == "confirmed sync:0:0")
    outcome = on_all(lambda rank: rank.sync.publish(V1), ranks)
    assert outcome[0].metrics["sync/endpoints"] == 2
    assert ranks[1].statuses() == {server: "confirmed sync:0:1"}


def test_rank_zero_repairs_for_all(open_ranks, model_dir, server, second_server):
    """Each rank finds the restart itself; rank 0 pushes, the other waits for it."""
    with closing(Restarting(server)) as proxy:
        ranks = open_ranks([proxy.url])
        on_all(lambda rank: rank.sync.publish(V0), ranks)
        with serve(model_dir) as restarted:
            proxy.move_to(restarted)
            wait_until(lambda: len(proxy.given) == 4)
            for rank in ranks:
                wait_until(lambda r=rank: set(r.statuses().values()) == {"confirmed sync:0:0"})
            assert proxy.given == [PROBE0, "sync:0:0", PROBE0, "sync:0:0"]
            assert stamps(ranks[1].generate(str(V0)).result(60)) == {str(V0)}


class RestartsAsALiar(MissesUpdates):
    """Honest, until it is another server that takes the probe, and not the version that follows."""

    honest = True
    starts = 0

    @property
    def is_missing(self) -> bool:
        return not self.honest and self.starts % 2 == 0

    async def answer(self, request, body):
        if request.path == "/start_weight_update" and not self.honest:
            self.starts += 1
        return await super().answer(request, body)

    def move_to(self, upstream: str) -> None:
        self._upstream, self.honest = upstream, False


def test_no_rank_uses_a_restarted_endpoint_that_rank_zero_has_not_proved(
    open_ranks, server, second_server, model_dir
):
    """The other rank does not look while rank 0 finds the restart, repairs, and excludes."""
    with ExitStack() as opened:
        proxy = opened.enter_context(
            closing(RestartsAsALiar(opened.enter_context(serve(model_dir))))
        )
        ranks = open_ranks([proxy.url, server])
        on_all(lambda rank: rank.sync.publish(V0), ranks)
        ranks[1].pool._interval_s = 60.0
        time.sleep(0.5)  # the look that is due
        proxy.move_to(second_server)
        wait_until(lambda: "serves other weights" in ranks[0].statuses()[proxy.url])
        assert ranks[1].statuses()[proxy.url] == "confirmed sync:0:0"  # it knows of nothing
        found = [ranks[1].generate(str(V0), seed).result(60) for seed in range(4)]
        assert {completion.endpoint for completion in found} == {server}
        assert all(stamps(completion) == {str(V0)} for completion in found)
        assert not ranks[1].pool.endpoints[0].usable(str(V0))


@pytest.mark.parametrize("withdrawn", [True, False], ids=["in-time", "too-late"])
def test_a_proof_that_fails_behind_the_last_step_stops_every_rank(withdrawn, open_ranks, server):
    """Before the weights move, so that no checkpoint can have the batch."""
    doubts = {}
    with closing(WrongWhenItReturns(server)) as proxy:
        ranks = open_ranks([proxy.url])
        confirmed = ranks[0].sync.confirmed
        confirmed.on_failed_proof, confirmed.end_batch = doubts.__setitem__, lambda: doubts
        on_all(lambda rank: rank.sync.publish(V0), ranks)
        proxy.move_to(NOWHERE)
        wait_until(lambda: "confirmed" not in ranks[0].statuses()[proxy.url])
        proxy.wrong = True
        proxy.move_to(server)
        wait_until(lambda: ranks[0].statuses()[proxy.url] == "confirmed sync:0:0")
        assert doubts == {proxy.url: 1}
        num_pushes = len(proxy.given)
        if withdrawn:
            doubts.clear()
        for outcome in on_all(lambda rank: rank.sync.publish(V1), ranks):
            if withdrawn:
                assert outcome.served.version == V1
            else:
                assert isinstance(outcome, InterruptedRun) and outcome.status == TEMPORARY_FAILURE
                assert "batch 0 was trained when" in str(outcome)
                assert f"{proxy.url} (since its proof number 1)" in str(outcome)
                assert len(proxy.given) == num_pushes


def test_what_is_excluded_and_why_is_the_same_everywhere(open_ranks, server, second_server):
    with closing(MissesUpdates(second_server)) as proxy:
        ranks = open_ranks([server, proxy.url], probe=False)
        for rank in ranks:
            rank.sync.engine.train(1e-1)
        on_all(lambda rank: rank.sync.publish(V0), ranks)
        assert ranks[0].statuses() == ranks[1].statuses()
        assert "serves other weights" in ranks[0].statuses()[proxy.url]


@pytest.mark.parametrize("times", [1, 100])
def test_every_rank_writes_damaged_weights_again_or_ends(times, open_ranks, server):
    with closing(DamagesArtefacts(server)) as proxy:
        ranks = open_ranks([proxy.url], probe=False)
        proxy.times = times
        for outcome in on_all(lambda rank: rank.sync.publish(V0), ranks):
            if times == 1:
                assert outcome.served.version == V0
            else:
                assert isinstance(outcome, Outage) and "were damaged" in str(outcome)


@pytest.mark.parametrize("gone", [True, False], ids=["down", "excluded"])
def test_every_rank_hears_that_nobody_serves(gone, open_ranks, server):
    """The checkpoint that follows an outage is collective."""
    with closing(Restarting(server) if gone else MissesUpdates(server, first=1)) as proxy:
        ranks = open_ranks([proxy.url], probe=False, max_outage_s=0.5)
        on_all(lambda rank: rank.sync.publish(V0), ranks)
        if gone:
            proxy.move_to(NOWHERE)
        for rank in ranks:
            rank.sync.engine.train(1e-1)
        for error in on_all(lambda rank: rank.sync.publish(V1), ranks):
            assert isinstance(error, Outage if gone else NoEndpointServes)
            assert proxy.url in str(error)


def test_another_rank_waits_only_so_long_for_a_repair(model_dir, server, tmp_path):
    _, other = thread_collectives()
    options = {"collectives": other, "startup_timeout_s": 0.1}
    with weight_sync(None, [server], tmp_path, **options) as rank:
        target = Target("never:0:0")
        rank.thread.run(rank.sync.confirmed.confirm(target, {}))
        with pytest.raises(EndpointUnavailable, match="not never:0:0"):
            rank.thread.run(rank.sync.confirmed.repair(rank.pool.endpoints[0]))
