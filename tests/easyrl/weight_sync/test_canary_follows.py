"""Canaries beside the first requests: no response is handed out before its endpoint has passed."""

import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
import torch

from easyrl.inference_client.errors import EndpointUnavailable
from easyrl.runtime.shared_cores import SharedCores
from easyrl.schema import NoEndpointServes, PolicyVersion, Published, ServedWeights, StopRequested
from tests.easyrl.weight_sync.test_weight_repair import on_all, thread_collectives
from tests.easyrl.weight_sync.weight_sync_parts import (
    PlainEngine,
    WrongSamples,
    stamps,
    wait_until,
    weight_sync,
)

V0, V1, V2, V3 = (PolicyVersion("sync", 0, v) for v in range(4))


def publish(rank, version: PolicyVersion):
    return rank.sync.publish(version, canary_follows=True)


def bring(rank, version: PolicyVersion):
    """As the trainer does where it has nothing to generate."""
    return rank.sync.settle(publish(rank, version))


def confirmed(rank) -> dict[str, float | None]:
    """What the certificate's line would say: canary means by URL."""
    return {c.url: c.canary_mean for c in rank.sync.confirmations}


@pytest.fixture
def proxy(server):
    with closing(WrongSamples(server)) as proxy:
        yield proxy


@pytest.fixture
def open_ranks(model_dir, tmp_path):
    with ExitStack() as opened:

        def open_them(urls, num_ranks=1, **options):
            return [
                opened.enter_context(
                    weight_sync(
                        PlainEngine(model_dir), urls, tmp_path, collectives=collectives, **options
                    )
                )
                for collectives in thread_collectives(num_ranks)
            ]

        yield open_them


def test_requests_go_out_before_the_canary_and_responses_come_behind_it(proxy, open_ranks):
    (rank,) = open_ranks([proxy.url])
    first = publish(rank, V0)
    assert rank.sync.settle(first) is first  # new: its canary came first
    assert first.metrics["sync/canary_mean"] < 1e-5
    rank.sync.engine.train(1e-3)
    published = publish(rank, V1)
    assert rank.statuses() == {proxy.url: "confirmed sync:0:1"} and confirmed(rank) == {}
    assert "sync/canary_mean" not in published.metrics
    before = proxy.num_answered
    response = rank.generate(str(V1))
    wait_until(lambda: proxy.num_answered == before + 17)  # the canary's 16 and this one
    time.sleep(0.1)
    assert not response.done()
    settled = rank.sync.settle(published)
    assert stamps(response.result(60)) == {str(V1)}
    assert settled.served == published.served
    assert settled.metrics["sync/endpoints"] == 1 and settled.metrics["time/canary_s"] > 0
    assert confirmed(rank)[proxy.url] == settled.metrics["sync/canary_mean"] < 1e-5
    assert rank.sync.settle(settled) is settled  # nothing is owed


def test_the_trainer_answers_with_one_thread_beside_the_first_requests(
    proxy, open_ranks, tmp_path, monkeypatch
):
    (rank,) = open_ranks([proxy.url])
    bring(rank, V0)
    threads, logprobs = [], rank.sync.engine.logprobs

    def counted(row):
        threads.append(torch.get_num_threads())
        return logprobs(row)

    monkeypatch.setattr(rank.sync.engine, "logprobs", counted)
    before = torch.get_num_threads()
    cores = SharedCores(tmp_path / "cores", num_cores=4)
    monkeypatch.setattr(rank.sync._delivery, "cores", cores)
    try:
        cores.take()
        assert torch.get_num_threads() == 4
        bring(rank, V1)
        assert threads and set(threads) == {1}
    finally:
        cores.close()
        torch.set_num_threads(before)


def test_responses_of_one_that_fails_are_made_by_another(proxy, second_server, open_ranks):
    (rank,) = open_ranks([proxy.url, second_server])
    bring(rank, V0)
    rank.sync.engine.train(1e-3)
    proxy.is_wrong = True
    published = publish(rank, V1)
    before = proxy.num_answered
    responses = [rank.generate(str(V1), seed) for seed in range(8)]
    wait_until(lambda: proxy.num_answered > before + 16)
    settled = rank.sync.settle(published)
    found = [response.result(60) for response in responses]
    assert {completion.endpoint for completion in found} == {second_server}
    assert all(stamps(completion) == {str(V1)} for completion in found)
    assert confirmed(rank).keys() == {second_server} and settled.metrics["sync/endpoints"] == 1
    wait_until(lambda: "could not be given its weights back" in rank.statuses()[proxy.url])


def test_one_that_has_failed_returns_and_is_sampled_from_first_from_then_on(
    proxy, second_server, open_ranks
):
    (rank,) = open_ranks([proxy.url, second_server])
    bring(rank, V0)
    proxy.is_wrong, before = True, proxy.num_answered
    published = publish(rank, V1)
    wait_until(lambda: proxy.num_answered == before + 16)
    proxy.is_wrong = False
    rank.sync.settle(published)
    wait_until(lambda: rank.statuses()[proxy.url] == "confirmed sync:0:1")
    assert confirmed(rank).keys() == {proxy.url, second_server}
    publish(rank, V2)
    assert confirmed(rank).keys() == {proxy.url}  # the other is yet to pass


@pytest.mark.parametrize("recovers", [True, False])
def test_where_nobody_passes_the_version_is_published_again_with_canaries_first(
    recovers, proxy, open_ranks
):
    (rank,) = open_ranks([proxy.url])
    bring(rank, V0)
    proxy.is_wrong = True
    published = publish(rank, V1)
    response = rank.generate(str(V1))
    before = len(proxy.given)
    if not recovers:
        with pytest.raises(NoEndpointServes, match="canary: log-probabilities differ"):
            rank.sync.settle(published)
        assert response.exception(60) is not None and confirmed(rank) == {}
        return
    deliver = rank.sync._delivery.deliver

    def heal(*arguments, **options):
        proxy.is_wrong = False
        return deliver(*arguments, **options)

    rank.sync._delivery.deliver = heal
    settled = rank.sync.settle(published)
    assert settled.served == published.served
    assert proxy.given[before:] == ["sync:0:0:probe", "sync:0:1"]
    assert confirmed(rank)[proxy.url] < 1e-5
    assert abs(response.result(60).logprobs).max() < 20 and response.result().proof == 3
    assert bring(rank, V2).metrics["sync/endpoints"] == 1


def test_ranks_share_the_verdict(proxy, second_server, open_ranks):
    ranks = open_ranks([proxy.url, second_server], num_ranks=2)
    on_all(lambda rank: bring(rank, V0), ranks)
    proxy.is_wrong = True
    published = on_all(lambda rank: publish(rank, V1), ranks)
    before = proxy.num_answered
    responses = [rank.generate(str(V1), seed) for rank in ranks for seed in range(4)]
    wait_until(lambda: proxy.num_answered >= before + 3)
    on_all(lambda rank: rank.sync.settle(published[ranks.index(rank)]), ranks)
    found = [response.result(60) for response in responses]
    assert {completion.endpoint for completion in found} == {second_server}
    assert all(confirmed(rank).keys() == {second_server} for rank in ranks)
    assert not ranks[1].pool.endpoints[0].usable(str(V1))


@pytest.mark.parametrize("passes", [True, False])
def test_one_that_has_failed_has_to_pass_also_where_other_canaries_came_first(
    passes, proxy, second_server, open_ranks
):
    (rank,) = open_ranks([proxy.url, second_server], probe=False)  # which it would fail, too
    bring(rank, V0)
    rank.sync._reconciler._canary_first.add(second_server)
    proxy.is_wrong = not passes
    first = publish(rank, V1).metrics
    settled = rank.sync.settle(Published(ServedWeights(V1, ""), first)).metrics
    assert 1e-5 > settled["sync/canary_mean"] >= first["sync/canary_mean"] > 0
    assert settled["sync/endpoints"] == 1 + passes and first["time/canary_s"] > 0
    if passes:  # one behind the other
        assert settled["time/canary_s"] > first["time/canary_s"]
        return
    wait_until(lambda: "could not be given its weights back" in rank.statuses()[proxy.url])
    assert confirmed(rank).keys() == {second_server}


def test_one_that_is_removed_before_its_canary_has_not_passed(proxy, second_server, open_ranks):
    """The other rank is told of the removal later, and has responses of it."""
    ranks = open_ranks([proxy.url, second_server], num_ranks=2)
    on_all(lambda rank: bring(rank, V0), ranks)
    proxy.is_wrong = True
    confirm = ranks[0].sync.confirmed.confirm

    async def confirm_and_remove(*arguments):
        await confirm(*arguments)
        ranks[0].pool.remove(proxy.url)

    ranks[0].sync.confirmed.confirm = confirm_and_remove
    published = on_all(lambda rank: publish(rank, V1), ranks)
    responses = [ranks[1].generate(str(V1), seed) for seed in range(4)]
    on_all(lambda rank: rank.sync.settle(published[ranks.index(rank)]), ranks)
    assert {response.result(60).endpoint for response in responses} == {second_server}
    assert all(confirmed(rank).keys() == {second_server} for rank in ranks)


@pytest.mark.parametrize("passes", [True, False])
def test_what_was_held_back_is_not_forgotten_with_an_endpoint_that_is_removed_and_added_again(
    passes, proxy, second_server, open_ranks
):
    (rank,) = open_ranks([proxy.url, second_server])
    bring(rank, V0)
    proxy.is_wrong, before = not passes, proxy.num_answered
    published = publish(rank, V1)
    responses = [rank.generate(str(V1), seed) for seed in range(8)]
    wait_until(lambda: proxy.num_answered >= before + 17)

    async def remove_and_add():
        rank.pool.remove(proxy.url)
        rank.pool.add(proxy.url)

    rank.thread.run(remove_and_add())
    rank.sync.settle(published)
    makers = {response.result(60).endpoint for response in responses}
    assert makers == ({proxy.url, second_server} if passes else {second_server})
    if passes:
        wait_until(lambda: rank.statuses()[proxy.url] == f"confirmed {V1}")


def test_a_rank_that_has_lost_an_endpoint_meanwhile_has_it_back_when_all_have_settled(
    proxy, open_ranks
):
    ranks = open_ranks([proxy.url], num_ranks=2)
    on_all(lambda rank: bring(rank, V0), ranks)
    published = on_all(lambda rank: publish(rank, V1), ranks)
    before = proxy.num_answered
    response = ranks[1].generate(str(V1))
    wait_until(lambda: proxy.num_answered > before)
    (lost,) = ranks[1].pool.endpoints

    async def lose():
        ranks[1].pool.set_aside(lost, EndpointUnavailable(lost.url, "connection reset"))

    ranks[1].thread.run(lose())
    wait_until(lambda: lost.repairing)
    assert not response.done()
    on_all(lambda rank: rank.sync.settle(published[ranks.index(rank)]), ranks)
    assert stamps(response.result(60)) == {str(V1)}
    wait_until(lambda: lost.usable(str(V1)))


def test_canaries_are_asked_for_before_another_rank_may_send_requests(proxy, open_ranks):
    """A server with all that it can decode at once would make them behind whole responses."""
    ranks = open_ranks([proxy.url], num_ranks=2)
    on_all(lambda rank: bring(rank, V0), ranks)
    before = proxy.num_answered
    broadcast = ranks[0].sync.collectives.broadcast

    def broadcast_late(value):
        if isinstance(value, dict) and "tensors" in value:
            wait_until(lambda: proxy.num_answered == before + 16)
        return broadcast(value)

    ranks[0].sync.collectives.broadcast = broadcast_late
    published = on_all(lambda rank: publish(rank, V1), ranks)
    assert [type(outcome) for outcome in published] == [Published] * 2
    assert "sync/canary_mean" not in published[0].metrics
    on_all(lambda rank: rank.sync.settle(published[ranks.index(rank)]), ranks)
    assert all(confirmed(rank)[proxy.url] < 1e-5 for rank in ranks[:1])


@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_a_stop_ends_the_waiting_for_canaries_on_all_ranks(delay_s, proxy, open_ranks):
    ranks = open_ranks([proxy.url], num_ranks=2)
    on_all(lambda rank: bring(rank, V0), ranks)
    proxy.hangs = True
    published = on_all(lambda rank: publish(rank, V1), ranks)
    response = ranks[1].generate(str(V1))
    timer = threading.Timer(delay_s, ranks[0].sync.stop.request, ["SIGTERM"])
    timer.start()
    if not delay_s:
        timer.join()
    start_s = time.monotonic()
    outcomes = on_all(lambda rank: rank.sync.settle(published[ranks.index(rank)]), ranks)
    assert [type(outcome) for outcome in outcomes] == [StopRequested] * 2
    assert time.monotonic() - start_s < 10.0 and not response.done()
    timer.join()
    response.cancel()


def test_ranks_publish_again_together_where_nobody_passes(proxy, open_ranks):
    ranks = open_ranks([proxy.url], num_ranks=2)
    on_all(lambda rank: bring(rank, V0), ranks)
    proxy.is_wrong = True
    published = on_all(lambda rank: publish(rank, V1), ranks)
    outcomes = on_all(lambda rank: rank.sync.settle(published[ranks.index(rank)]), ranks)
    assert [type(outcome) for outcome in outcomes] == [NoEndpointServes] * 2


def test_a_canary_that_hangs_costs_its_time_out_and_the_endpoint(proxy, second_server, open_ranks):
    (rank,) = open_ranks([proxy.url, second_server])
    bring(rank, V0)
    prover = rank.sync._prover
    prover.canary = replace(prover.canary, timeout_s=1.0)
    proxy.hangs = True
    published = publish(rank, V1)
    responses = [rank.generate(str(V1), seed) for seed in range(4)]
    start_s = time.monotonic()
    rank.sync.settle(published)
    assert 0.5 < time.monotonic() - start_s < 10.0
    assert {response.result(60).endpoint for response in responses} == {second_server}
    assert confirmed(rank).keys() == {second_server}


@pytest.mark.parametrize("option", ["prove", "canary"])
def test_nothing_follows_without_proof_or_canary(option, proxy, open_ranks):
    (rank,) = open_ranks([proxy.url], **{option: False})
    bring(rank, V0)
    rank.sync.engine.train(1e-3)
    published = publish(rank, V1)
    assert confirmed(rank).keys() == {proxy.url} and rank.sync.settle(published) is published
    rank.generate(str(V1)).result(60)


def test_a_run_that_ends_before_it_has_settled_waits_for_nobody(proxy, open_ranks):
    (rank,) = open_ranks([proxy.url])
    bring(rank, V0)
    proxy.hangs = True
    publish(rank, V1)
    start_s = time.monotonic()
    rank.sync.close()
    assert time.monotonic() - start_s < 5.0
