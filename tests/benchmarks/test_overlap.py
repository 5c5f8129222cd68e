"""The overlap benchmark: its load, its figures, and the endpoint that sleeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import orjson
import pytest

from benchmarks.overlap import BEFORE, NOW, compared, of_before_keys
from benchmarks.parts.overlap.balance import MAX_MEASUREMENTS, balance
from benchmarks.parts.overlap.endpoint import SleepingEndpoint
from benchmarks.parts.overlap.runs import OneRank, TwoRanks, Workload
from benchmarks.parts.overlap.spans import Batch, overlap, read_batches, training_over_generation
from easyrl.config import SamplingConfig
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import RequestRejected
from easyrl.inference_client.responses import parse_generate_response

VOCABULARY = 30
END = 0


# ---- the load ------------------------------------------------------------------------------------


class Measured:
    """Training over generation by speed, as the test says; remembers what was asked for."""

    def __init__(self, share: Callable[[float], float]) -> None:
        self.share = share
        self.speeds: list[float] = []

    def __call__(self, speed: float) -> float:
        self.speeds.append(speed)
        return self.share(speed)


def test_generation_is_made_faster_or_slower_until_the_share_is_right() -> None:
    # a second of it does not change with the speed
    measure = Measured(lambda seconds_per_token: 6 / (1 + 10 * seconds_per_token))
    chosen = balance(0.3, measure, lambda s, factor: s * factor)
    assert measure.speeds[0] == 0.3 and measure.speeds[-1] == chosen
    assert 0.7 <= measure.share(chosen) <= 0.8
    assert 2 <= len(measure.speeds) <= MAX_MEASUREMENTS


def test_what_is_right_is_measured_once_and_left() -> None:
    measure = Measured(lambda speed: 0.71)
    assert balance(3, measure, lambda speed, factor: 1 / 0) == 3 and measure.speeds == [3]


def test_the_nearest_is_chosen_where_no_share_is_right() -> None:
    jumps = Measured(lambda inflight: 0.65 if inflight < 12 else 0.9)  # over what is wanted
    assert balance(9, jumps, lambda n, factor: round(n / factor)) < 12
    hopeless = Measured(lambda speed: 0.1 + speed / 100)
    assert balance(1, hopeless, lambda speed, factor: speed + 1) == 5
    assert hopeless.speeds == [1, 2, 3, 4, 5]  # and no further


def test_both_setups_get_slower_by_the_factor(tmp_path: Path) -> None:
    one = OneRank(tmp_path, Workload())
    assert one.slower(10, 0.7) == 14 and one.slower(1, 3) == 1
    two = TwoRanks(tmp_path, Workload(), SleepingEndpoint(VOCABULARY, END))
    assert two.slower(1e-3, 2) == 2e-3


# ---- the figures ---------------------------------------------------------------------------------


def log(path: Path, *, offset: float = 0.0) -> None:
    """A first weight sync, then a batch of two groups in two micro-batches."""
    events = [
        (0, "sync_start"),
        (1, "sync_end"),
        (2, "batch_dispatched"),
        (4, "group_ready"),
        (5, "micro_batch_start"),
        (7, "micro_batch_end"),
        (8 + offset, "group_ready"),
        (9 + offset, "micro_batch_start"),
        (10 + offset, "micro_batch_end"),
        (11 + offset, "step"),
        (12 + offset, "sync_start"),
        (14 + offset, "sync_end"),
    ]
    lines = [orjson.dumps({"t": t, "event": event}) for t, event in events]
    path.write_bytes(b"\n".join(lines))


def test_spans_are_those_of_the_slowest_rank(tmp_path: Path) -> None:
    log(tmp_path / "events-rank0.jsonl")
    assert read_batches(tmp_path, 1) == [
        Batch(wall=12, generation=6, training=3, step=2, sync=2, first_group=2, tail=2)
    ]
    log(tmp_path / "events-rank1.jsonl", offset=5)
    assert read_batches(tmp_path, 2) == [
        Batch(wall=17, generation=11, training=3, step=2, sync=2, first_group=2, tail=2)
    ]


def test_the_bound_is_the_longer_phase_with_sync_and_step() -> None:
    sync = Batch(wall=19, generation=10, training=7, step=1, sync=1, first_group=1, tail=7)
    fast = Batch(wall=13, generation=9, training=8, step=1, sync=1, first_group=1, tail=2)
    figures = overlap([sync, sync], [fast, fast])
    assert training_over_generation([sync, sync]) == 0.7
    assert figures["bound_s"] == 24 and figures["bound"] == pytest.approx(38 / 24)
    assert figures["async_over_sync"] == pytest.approx(38 / 26)
    assert figures["efficiency"] == pytest.approx(24 / 26)
    assert figures["own_efficiency"] == pytest.approx(22 / 26)
    assert (figures["generation_s"], figures["training_s"]) == (20, 14)


def test_an_earlier_revision_is_compared_by_medians() -> None:
    def rows(*seconds: float) -> list[dict[str, float]]:
        keys = ("sync_s", "async_s", "async_over_sync", "efficiency", "bound_s")
        return [dict.fromkeys(keys, s) for s in seconds]

    alone = compared({NOW: rows(2.0, 3.0, 9.0)})
    assert alone["async_s"] == 3.0 and of_before_keys(alone) == []
    both = compared({NOW: rows(2.0, 3.0, 9.0), BEFORE: rows(4.0, 5.0, 1.0)})
    assert (both["async_s"], both["before_async_s"], both["async_of_before"]) == (3.0, 4.0, 0.75)
    assert set(of_before_keys(both)) == {
        *("before_sync_s", "before_async_s", "before_async_over_sync", "before_efficiency"),
        *("sync_of_before", "async_of_before"),
    }


# ---- the endpoint --------------------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[SleepingEndpoint]:
    with SleepingEndpoint(VOCABULARY, END) as started:
        yield started


async def test_it_answers_as_a_server_and_takes_as_long_as_its_tokens(
    endpoint: SleepingEndpoint,
) -> None:
    sampling = SamplingConfig(min_tokens=4, max_tokens=9)
    async with aiohttp.ClientSession() as session:
        client = EndpointClient(endpoint.url, session)
        await client.health()
        assert (await client.served_model()).name == "sleeping"
        await client.set_weight_version("run:0:1")
        bodies = [await client.generate([1, 2, 3], sampling, seed=s) for s in (5, 5, 6, 7, 8)]
        some, again, *others = [parse_generate_response(b, endpoint.url, 3)[0] for b in bodies]
        assert some.token_ids.tolist() == again.token_ids.tolist()
        lengths = {len(c.token_ids) for c in (some, *others)}
        assert len(lengths) > 1 and lengths <= set(range(4, 10))
        assert all(0 <= t < VOCABULARY for c in others for t in c.token_ids)
        assert some.version_spans[0].version == "run:0:1"
        assert some.logprobs[0] == pytest.approx(-math.log(VOCABULARY))
        whole = SamplingConfig(max_tokens=9, ignore_eos=True)
        body = await client.generate([1, 2, 3], whole, seed=5)
        (canary,) = parse_generate_response(body, endpoint.url, 3)
        assert len(canary.token_ids) == 9 and canary.finish_reason == "length"
        endpoint.seconds_per_token = 0.05
        start = time.monotonic()
        await client.generate([1, 2, 3], sampling, seed=5)
        assert time.monotonic() - start >= 0.05 * len(some.token_ids)


async def test_it_takes_weights_and_proves_nothing(endpoint: SleepingEndpoint) -> None:
    async with aiohttp.ClientSession() as session:
        client = EndpointClient(endpoint.url, session)
        await client.pause("wait")
        await client.init_weight_transfer({"run": "r"})
        await client.start_weight_update()
        await client.update_weights({"artifact": "a", "chunks": []})
        await client.finish_weight_update("run:0:2")
        assert await client.reset_prefix_cache()
        await client.resume()
        assert await client.weight_version() == "run:0:2"
        with pytest.raises(RequestRejected):
            await client.prove_weights(bytes(32), {})
