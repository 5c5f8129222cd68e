"""Canaries beside the first requests: no response is handed out before its endpoint has passed."""

import time
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from easyrl.schema import NoEndpointServes, PolicyVersion
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
    deliver = rank.sync._deliver

    def heal(*arguments, **options):
        proxy.is_wrong = False
        return deliver(*arguments, **options)

    rank.sync._deliver = heal
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
