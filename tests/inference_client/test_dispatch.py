"""Who goes where next: order of groups, affinity, balance, and the waiting line's order."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.build.inference import LAST
from easyrl.inference_client.client import ServedModel
from easyrl.inference_client.pool.dispatch import Dispatcher
from easyrl.inference_client.pool.endpoint import Endpoint, Need
from easyrl.inference_client.pool.group_assignment import ExpectedLengths, GroupAssignment, Rank
from easyrl.inference_client.pool.request_queue import Waiting, WaitingLine

V1 = "run:0:1"
G = 4


class FakeClient:
    def __init__(self, url: str) -> None:
        self.url = url


def endpoints(count: int, max_inflight: int = 8) -> list[Endpoint]:
    made = [Endpoint(FakeClient(f"http://{name}"), max_inflight) for name in "abcdef"[:count]]
    for endpoint in made:
        endpoint.confirmed_version = V1
    return made


def dispatcher(group: list[Endpoint]) -> Dispatcher:
    made = Dispatcher(max_outage_s=60.0)
    made.endpoints = group
    return made


def group_of(
    order: int, expected: float = 0.0, tokens: int = 10, priority: int = 0
) -> GroupAssignment:
    return GroupAssignment((priority, expected, order), V1, tokens, G)


class Batch:
    """Groups that take their turn, send all their samples, and remember where they went."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.turns: list[int] = []
        self.running: list[tuple[int, Endpoint, GroupAssignment]] = []
        self.tasks: list[asyncio.Task] = []

    def start(self, *groups: GroupAssignment) -> None:
        self.tasks += [asyncio.ensure_future(self._run(group)) for group in groups]

    async def _run(self, group: GroupAssignment) -> None:
        await self.dispatcher.turn(group)
        self.turns.append(group.rank[-1])
        await asyncio.gather(*[self._sample(group) for _ in range(G)])
        self.dispatcher.leave(group)

    async def _sample(self, group: GroupAssignment) -> None:
        endpoint = await self.dispatcher.place(group, None)
        self.running.append((group.rank[-1], endpoint, group))

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def where(self, order: int) -> set[str]:
        return {endpoint.url for number, endpoint, _ in self.running if number == order}

    def finish(self, order: int) -> None:
        for entry in [entry for entry in self.running if entry[0] == order]:
            self.running.remove(entry)
            self.dispatcher.release(entry[1], entry[2].sample_tokens)

    async def finish_all(self, expected: int) -> None:
        count = 0
        while count < expected:
            await self.settle()
            assert self.running, "nothing runs, and not all have"
            number, endpoint, group = self.running.pop(0)
            self.dispatcher.release(endpoint, group.sample_tokens)
            count += 1
        await asyncio.gather(*self.tasks)


# -- order ---------------------------------------------------------------------------------------


async def test_groups_that_are_expected_short_go_first_whoever_asks_first():
    batch = Batch(dispatcher(endpoints(1, max_inflight=G)))
    batch.start(*[group_of(order, expected) for order, expected in enumerate([50, 10, 30, 20, 40])])
    await batch.settle()
    assert batch.turns == [1]
    await batch.finish_all(5 * G)
    assert batch.turns == [1, 3, 2, 4, 0]


async def test_groups_of_an_earlier_update_go_before_shorter_ones_of_a_later():
    batch = Batch(dispatcher(endpoints(1, max_inflight=G)))
    expectations = [(1, 10), (0, 50), (2, 5), (0, 30), (1, 20)]
    batch.start(
        *[group_of(i, expected, priority=p) for i, (p, expected) in enumerate(expectations)]
    )
    await batch.finish_all(5 * G)
    assert batch.turns == [3, 1, 0, 4, 2]


async def test_a_group_of_an_earlier_update_that_comes_late_goes_next():
    batch = Batch(dispatcher(endpoints(1, max_inflight=G)))
    batch.start(*[group_of(order, priority=1) for order in range(3)])
    await batch.settle()
    batch.start(group_of(3, expected=99, priority=0))
    await batch.finish_all(4 * G)
    assert batch.turns == [0, 3, 1, 2]


async def test_who_needs_another_context_is_in_the_same_order():
    """Held-out groups, which need less of it, asked first: not before any of training."""
    group = endpoints(2, max_inflight=G)
    for endpoint in group:
        endpoint.served = ServedModel("m", 100)
    batch = Batch(dispatcher(group))
    held_out = [group_of(order, priority=LAST) for order in range(2, 4)]
    training = [group_of(order, priority=order % 2) for order in range(4, 7)]
    for each in held_out:
        each.need = Need(V1, 50, 10)
    for each in training:
        each.need = Need(V1, 90, 10)
    batch.start(*[group_of(order) for order in range(2)])
    await batch.settle()
    assert not batch.dispatcher.is_wanted(before=LAST)
    batch.start(*held_out)
    await batch.settle()
    assert not batch.dispatcher.is_wanted(before=LAST)
    batch.start(*training)
    await batch.settle()
    assert batch.dispatcher.is_wanted(before=LAST) and not batch.dispatcher.is_wanted(before=0)
    await batch.finish_all(7 * G)
    assert batch.turns == [0, 1, 4, 6, 5, 2, 3]


async def test_a_sample_of_training_goes_before_one_that_was_in_another_line_first():
    (endpoint,) = endpoints(1, max_inflight=1)
    endpoint.served = ServedModel("m", 100)
    pool = dispatcher([endpoint])
    running = group_of(0)
    assert await pool.place(running, None) is endpoint
    placed = []

    async def place(order: int, priority: int, context: int) -> None:
        group = group_of(order, priority=priority)
        group.need = Need(V1, context, 10)
        placed.append((order, await pool.place(group, None)))

    tasks = [asyncio.ensure_future(place(1, LAST, 50)), asyncio.ensure_future(place(2, 0, 90))]
    await asyncio.sleep(0)
    for _ in tasks:
        pool.release(endpoint, running.sample_tokens)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert [order for order, _ in placed] == [2, 1]


async def test_groups_of_equal_expectation_go_in_the_order_of_asking():
    batch = Batch(dispatcher(endpoints(1, max_inflight=G)))
    batch.start(*[group_of(order) for order in range(6)])
    await batch.finish_all(6 * G)
    assert batch.turns == list(range(6))


async def test_a_turn_is_given_only_where_there_is_room_for_what_was_promised():
    batch = Batch(dispatcher(endpoints(2, max_inflight=2 * G)))
    batch.start(*[group_of(order) for order in range(20)])
    await batch.settle()
    assert len(batch.turns) == 4  # 2 x 8 places for groups of 4
    assert [endpoint.num_inflight for endpoint in batch.dispatcher.endpoints] == [2 * G, 2 * G]
    await batch.finish_all(20 * G)


# -- where to ------------------------------------------------------------------------------------


async def test_the_samples_of_a_group_share_an_endpoint_and_groups_are_spread():
    batch = Batch(dispatcher(endpoints(3, max_inflight=100)))
    batch.start(*[group_of(order) for order in range(9)])
    await batch.settle()
    assert all(len(batch.where(order)) == 1 for order in range(9))
    assert [endpoint.num_inflight for endpoint in batch.dispatcher.endpoints] == [3 * G] * 3


async def test_groups_are_spread_by_tokens_not_by_number():
    batch = Batch(dispatcher(endpoints(2, max_inflight=100)))
    batch.start(group_of(0, tokens=100), *[group_of(order) for order in range(1, 11)])
    await batch.settle()
    long, short = batch.dispatcher.endpoints
    assert (long.num_inflight, short.num_inflight) == (G, 10 * G)


async def test_fewer_groups_than_idle_endpoints_are_shared_out():
    batch = Batch(dispatcher(endpoints(4, max_inflight=100)))
    batch.start(group_of(0))
    await batch.settle()
    assert [endpoint.num_inflight for endpoint in batch.dispatcher.endpoints] == [1, 1, 1, 1]


async def test_a_sample_waits_for_its_full_endpoint_while_others_have_groups_to_do():
    one, two = group = endpoints(2, max_inflight=6)
    batch = Batch(dispatcher(group))
    batch.start(*[group_of(order) for order in range(7)])
    await batch.settle()
    # Each has one group and half of the next; the other halves wait at home, not elsewhere.
    assert all(len(batch.where(order)) == 1 for order in batch.turns)
    assert one.num_inflight == two.num_inflight == 6 and len(batch.turns) == 4
    await batch.finish_all(7 * G)


async def test_at_the_end_of_a_batch_waiting_samples_go_where_there_is_room():
    one, two = group = endpoints(2, max_inflight=3)
    batch = Batch(dispatcher(group))
    batch.start(group_of(0), group_of(1))
    await batch.settle()
    assert len(batch.where(0)) == len(batch.where(1)) == 1
    first = next(iter(batch.where(0)))
    batch.finish(0)  # frees its three places: one for its fourth, two for nobody's home
    await batch.settle()
    assert batch.where(1) == {one.url, two.url} and batch.where(0) == {first}
    await batch.finish_all(5)


async def test_a_group_whose_endpoint_is_lost_goes_on_together_elsewhere():
    one, two = group = endpoints(2, max_inflight=2)
    batch = Batch(dispatcher(group))
    batch.start(group_of(0), group_of(1))
    await batch.settle()
    lost = next(endpoint for endpoint in group if endpoint.url in batch.where(0))
    lost.down = "gone"
    batch.dispatcher.changed(lost)
    other = two if lost is one else one
    batch.finish(1)
    await batch.settle()
    waiting_here = [entry for entry in batch.running if entry[1] is other]
    assert waiting_here and waiting_here[0][0] == 0  # older than what is left of group 1
    lost.down = None
    batch.dispatcher.changed(lost)
    await batch.finish_all(6)


async def test_a_group_that_is_cancelled_gives_back_what_was_held_for_it():
    (only,) = group = endpoints(1, max_inflight=G)
    made = dispatcher(group)
    first, second = group_of(0), group_of(1)
    await made.turn(first)
    waiting = asyncio.ensure_future(made.turn(second))
    await asyncio.sleep(0.01)
    assert only.num_reserved == G and only.outstanding_tokens == 40 and not waiting.done()
    made.leave(first)
    await asyncio.wait_for(waiting, 1)
    assert second.num_reserved == G
    third = asyncio.ensure_future(made.turn(group_of(2)))
    await asyncio.sleep(0.01)
    third.cancel()
    made.leave(second)
    await asyncio.sleep(0.01)
    assert only.num_reserved == only.outstanding_tokens == only.num_inflight == 0
    assert made.waiting_needs() == []


# -- expected lengths ----------------------------------------------------------------------------


def test_lengths_are_expected_from_the_prompt_then_the_dataset_then_the_limit():
    lengths = ExpectedLengths(max_tokens=1000)
    assert lengths.of(7) == 500
    lengths.saw(1, 100)
    lengths.saw(1, 200)
    lengths.saw(2, 600)
    assert lengths.of(1) == pytest.approx(150) and lengths.of(2) == 600
    assert lengths.of(7) == pytest.approx(300)
    for _ in range(200):
        lengths.saw(1, 1000)
    assert lengths.of(1) > 990  # the policy has changed; the old ones are forgotten


# -- the waiting line ----------------------------------------------------------------------------


def waiting(rank: Rank, number: int, home: Endpoint | None, avoid: Endpoint | None):
    group = GroupAssignment(rank, V1, 1, 1)
    group.endpoint = home
    place = asyncio.get_running_loop().create_future()
    return Waiting(group, number, place, avoid)


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, 3),
            st.sampled_from([None, 0, 1, 2]),
            st.sampled_from([None, None, 0, 1]),
        ),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
        st.tuples(st.just("take"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("steal")),
        st.tuples(st.just("forsake"), st.integers(0, 2)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_the_line_gives_the_first_that_fits_as_a_sorted_list_would(steps):
    async def run() -> None:
        group, line, model = endpoints(3), WaitingLine(), []
        everyone: list[Waiting] = []
        for number, step in enumerate(steps):
            match step:
                case ("add", rank, home, avoid):
                    home = None if home is None else group[home]
                    new = waiting(
                        (rank % 2, rank, 0), number, home, None if avoid is None else group[avoid]
                    )
                    line.add(new)
                    everyone.append(new)
                    model.append([new, None if new.avoid else home])
                case ("cancel", which) if everyone:
                    gone = everyone[which % len(everyone)]
                    if not gone.place.done():
                        gone.place.cancel()
                    model = [entry for entry in model if entry[0] is not gone]
                    line.remove(gone)
                case ("take", at, is_only):
                    here = group[at]
                    fits = [w for w, home in model if home in (None, here)
                            and (is_only or w.avoid is not here)]  # fmt: skip
                    check(line.next_for(here, is_only=is_only), fits, model)
                case ("steal",):
                    check(line.steal(), [w for w, home in model if home is not None], model)
                case ("forsake", at):
                    line.forsake(group[at])
                    for entry in model:
                        entry[1] = None if entry[1] is group[at] else entry[1]
            assert line.num_samples == len(model)

    def check(taken: Waiting | None, fits: list[Waiting], model: list) -> None:
        assert taken is (min(fits, key=lambda w: w.key) if fits else None)
        if taken is not None:
            taken.place.set_result(None)
            model[:] = [entry for entry in model if entry[0] is not taken]

    asyncio.run(run())


async def test_ten_thousand_groups_in_line_are_taken_without_a_scan():
    line, compared = WaitingLine(), 0

    class CountedRank(tuple):
        def __lt__(self, other):
            nonlocal compared
            compared += 1
            return tuple.__lt__(self, other)

    count = 10_000
    for order in range(count):
        line.add_group(waiting(CountedRank((0, order * 7919 % count, order)), order, None, None))
    first = compared
    orders = [line.next_group().group.rank[1] for _ in range(count)]
    assert orders == list(range(count)) and line.next_group() is None and not line
    assert first < 3 * count and compared - first < 20 * count  # log2(10,000) = 13.3
