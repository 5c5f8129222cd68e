"""What is computed ahead, when, and that a row gets with it exactly what it gets without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.accumulation import Accumulator, GroupFunctions, OnPolicyViolation
from easyrl.agreement import Agreement
from easyrl.config import Config
from easyrl.dataloaders.open_samples import OpenSamples
from easyrl.dataloaders.packing.groups import batch_denominator
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.engines.base import MetricSums
from easyrl.event_log import ignore
from easyrl.look_ahead import LookAhead
from easyrl.schema import FrozenLogprobs, MicroBatch, RolloutGroup, SampleKey, StopRequested
from easyrl.stopping import StopRequest
from easyrl.wiring.parts import _looks_ahead
from tests.dataloaders.packed_rows import BUSY, PACKINGS, branch, pack, random_groups
from tests.tiny_models import random_group

G = 4


class TellingEngine:
    """Frozen models whose log-probability of a token depends on all that it may depend on.

    ``weights`` stands for those of the old policy; ``frozen`` keeps the rows they were run on.
    """

    lockstep = False

    def __init__(self, *, reference: bool = True, old_policy: bool = True) -> None:
        self._has = reference, old_policy
        self.weights = 0
        self.frozen: list[MicroBatch] = []
        self.trained: list[MicroBatch] = []

    def frozen_logprobs(self, row: MicroBatch) -> FrozenLogprobs:
        self.frozen.append(row)
        return self.expected(row)

    def expected(self, row: MicroBatch) -> FrozenLogprobs:
        def of(model: int) -> torch.Tensor:
            tokens = zip(row.predictor_index.tolist(), row.label_ids.tolist(), strict=True)
            ids = row.input_ids.tolist()
            said = [
                hash((model, *(ids[p] for p in branch(row, at)), label)) for at, label in tokens
            ]
            return torch.tensor([value % 1_000_003 for value in said], dtype=torch.float32)

        reference, old_policy = self._has
        return FrozenLogprobs(
            of(-1) if reference else None, of(self.weights) if old_policy else None
        )

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> list[MetricSums]:
        self.trained += micro_batches
        return [MetricSums() for _ in micro_batches]


def make(
    engine: TellingEngine, samples: OpenSamples, *, max_tokens: int = 100, **settings: Any
) -> LookAhead:
    def packed(
        groups: Sequence[RolloutGroup], advantages: Sequence[np.ndarray]
    ) -> list[MicroBatch]:
        return pack(groups, advantages, budget=max_tokens, **settings)

    return LookAhead(cast(Any, engine), packed, samples, max_tokens=max_tokens, record=ignore)


def group(index: int, prompt: int, *lengths: int, **settings: Any) -> RolloutGroup:
    return random_group(
        np.random.default_rng(index), prompt, list(lengths), index=index, **settings
    )


def finish(samples: OpenSamples, group: RolloutGroup, *numbers: int) -> None:
    for number in numbers:
        samples.add(group.prompt, number, group.completions[number])


def keys(row: MicroBatch) -> list[tuple[int, int]]:
    return [(key.prompt, key.sample) for key in row.sequences]


def assert_same(got: FrozenLogprobs | None, expected: FrozenLogprobs) -> None:
    assert got is not None
    for mine, right in (
        (got.reference, expected.reference),
        (got.old_policy, expected.old_policy),
    ):
        assert (mine is None) == (right is None)
        assert mine is None or torch.equal(mine, right)


# ---- what a row gets -----------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS)
@settings(BUSY, max_examples=60)
@given(data=st.data())
def test_a_row_gets_what_it_would_get_without(packing: str, data: st.DataObject) -> None:
    """Any groups, order of return, and moments in which the trainer is idle; all exactly equal."""
    groups = data.draw(random_groups())
    samples = OpenSamples(max((len(g.completions) for g in groups), default=0))
    masks = data.draw(st.booleans())
    engine = TellingEngine(reference=data.draw(st.booleans()))
    budget = data.draw(st.integers(10, 100))
    ahead = make(engine, samples, max_tokens=budget, packing=packing, mask_truncated=masks)
    returns = [(g, number) for g in groups for number in range(len(g.completions))]
    for each, number in data.draw(st.permutations(returns)):
        finish(samples, each, number)
        if data.draw(st.booleans()):
            ahead.work()
    rows = pack(
        groups, mask_truncated=masks, packing=packing, budget=data.draw(st.integers(10, 100))
    )
    for row in rows:
        before = ahead.num_tokens
        completed = ahead.complete(row)
        if completed is row:
            assert ahead.num_tokens == before and row.frozen is None
        else:
            assert_same(completed.frozen, engine.expected(row))
            assert replace(completed, frozen=None) == row
    asked = [key for row in engine.frozen for key in row.sequences]
    assert len(asked) == len(set(asked))  # no response goes through the models twice


def test_what_is_known_does_not_go_through_the_models_again() -> None:
    engine, samples, g = TellingEngine(), OpenSamples(3), group(0, 5, 6, 7, 8)
    ahead = make(engine, samples)
    finish(samples, g, 2, 0)
    assert ahead.work() and not ahead.work()
    assert [keys(row) for row in engine.frozen] == [[(0, 2), (0, 0)]]
    [row] = pack([g])
    assert_same(ahead.complete(row).frozen, engine.expected(row))
    assert keys(engine.frozen[-1]) == [(0, 1)] and engine.frozen[-1].num_tokens == 5 + 7
    assert ahead.num_tokens == 6 + 8
    assert ahead.complete(row) is row  # it is forgotten with its use


def test_a_row_of_which_nothing_is_known_is_left_alone() -> None:
    engine, samples = TellingEngine(), OpenSamples(1)
    ahead = make(engine, samples)
    known, other = group(0, 2, 6), group(1, 2, 6)
    finish(samples, known, 0)
    assert ahead.work()
    [row] = pack([other])
    assert ahead.complete(row) is row and ahead.num_tokens == 0


def test_a_dummy_is_nobodys_row() -> None:
    """Its key may be that of a real response."""
    engine, samples = TellingEngine(), OpenSamples(1)
    ahead = make(engine, samples)
    finish(samples, group(0, 2, 6), 0)
    assert ahead.work() and keys(engine.frozen[0]) == [(0, 0)]
    dummy = dummy_micro_batch()
    assert dummy.sequences == (SampleKey(0, 0, 0),)
    assert ahead.complete(dummy) is dummy


# ---- what is chosen ------------------------------------------------------------------------------


def test_the_prompt_is_not_repeated_for_less_than_a_third_of_its_length() -> None:
    engine, samples, g = TellingEngine(), OpenSamples(4), group(0, 30, 4, 5, 1, 2)
    ahead = make(engine, samples)
    finish(samples, g, 0, 1)
    assert not ahead.work() and engine.frozen == []  # 9 tokens for a prompt of 30
    finish(samples, g, 2)
    assert ahead.work() and keys(engine.frozen[0]) == [(0, 0), (0, 1), (0, 2)]
    finish(samples, g, 3)
    assert ahead.work() and keys(engine.frozen[1]) == [(0, 3)]  # the last: its prompt is due anyway
    assert not ahead.work()


def test_groups_that_waste_least_come_first_in_one_row_within_the_budget() -> None:
    engine, samples = TellingEngine(), OpenSamples(2)
    ahead = make(engine, samples, max_tokens=40)
    for each in (group(0, 9, 9, 1), group(1, 2, 9, 1), group(2, 2, 9, 1), group(3, 9, 12, 1)):
        finish(samples, each, 0)
    finish(samples, each := group(4, 9, 1, 1), 0, 1)  # nothing is missing
    assert each.prompt.index == 4 and ahead.work()
    [row] = engine.frozen
    # 11 + 11 + 11, and 7 left: nothing that pays fits beside it
    assert {index for index, _ in keys(row)} == {1, 2, 4} and row.num_tokens == 33
    assert keys(row)[:2] == [(4, 0), (4, 1)]
    assert ahead.work() and {index for index, _ in keys(engine.frozen[1])} == {0, 3}
    assert not ahead.work()


def test_a_group_longer_than_the_budget_is_done_in_parts() -> None:
    engine, samples, g = TellingEngine(), OpenSamples(4), group(0, 4, 8, 8, 8, 60)
    ahead = make(engine, samples, max_tokens=20)
    finish(samples, g, 0, 1, 2, 3)
    while ahead.work():
        pass
    assert [keys(row) for row in engine.frozen] == [[(0, 0), (0, 1)], [(0, 2)]]
    [row] = pack([g], budget=100)
    assert_same(ahead.complete(row).frozen, engine.expected(row))


def test_responses_that_are_not_trained_are_not_computed() -> None:
    engine, samples, g = TellingEngine(), OpenSamples(2), group(0, 2, 9, 9, truncated=(0, 1))
    ahead = make(engine, samples, mask_truncated=True)
    finish(samples, g, 0)
    assert ahead.work() and not ahead.work() and engine.frozen == []


def test_an_update_without_frozen_models_is_left_alone_after_one_look() -> None:
    """The first of several without a reference: its old policy is the policy."""
    engine, samples = TellingEngine(reference=False, old_policy=False), OpenSamples(1)
    ahead = make(engine, samples)
    groups = [group(0, 3, 5), group(1, 3, 5)]
    for each in groups:
        finish(samples, each, 0)
        assert not ahead.work()
    assert len(engine.frozen) == 1
    assert all(ahead.complete(row) is row for row in pack(groups)) and ahead.num_tokens == 0


# ---- one update after another --------------------------------------------------------------------

Step = Callable[[OpenSamples], object] | list[RolloutGroup]


class Scripted:
    """A ``GroupSource``: between its groups things happen, and then the trainer is idle."""

    wait_s = load_s = 0.0
    first_group_wait_s = None
    accepted_versions = frozenset({"run:0:0"})
    recovered: frozenset[Any] = frozenset()
    discarded: frozenset[Any] = frozenset()

    def __init__(self, *script: Step) -> None:
        self._script = list(script)
        self._error: BaseException | None = None
        self.open_samples = OpenSamples(G)
        self.was_idle = False

    def take_ready(self, max_tokens: int, idle: Any = None) -> list[RolloutGroup]:
        while self._script:
            match self._script.pop(0):
                case list(groups):
                    return groups
                case happens:
                    happens(self.open_samples)
            while idle is not None and idle():
                self.was_idle = True
            if self._error is not None:
                raise self._error
        return []

    def complete(self) -> None: ...
    def close(self) -> None: ...
    def interrupt(self, error: BaseException) -> None:
        self._error = error


def accumulator(engine: TellingEngine, *, look_ahead: bool = True, **options: Any) -> Accumulator:
    return Accumulator(
        engine=cast(Any, engine),
        agreement=Agreement(0, 1),
        functions=GroupFunctions(
            advantages=lambda group: group.rewards - group.rewards.mean(),
            pack=pack,
            denominator=lambda groups: batch_denominator(groups, "token", False),
            dummy=dummy_micro_batch,
        ),
        stop=options.get("stop") or StopRequest(grace_s=60.0),
        is_interruption=lambda error: isinstance(error, StopRequested),
        record=options.get("record", ignore),
        max_tokens=100,
        synchronous=False,
        look_ahead=look_ahead,
    )


def has(group: RolloutGroup, *numbers: int) -> Step:
    return lambda samples: finish(samples, group, *numbers)


def test_an_update_uses_what_was_computed_while_it_waited() -> None:
    engine, first, second = TellingEngine(), group(0, 3, 5, 5, 5, 5), group(1, 3, 5, 5, 5, 5)
    events: list[str] = []
    source = Scripted(has(first, 0, 1), has(second, 0, 1, 2, 3), [first], has(first), [second])
    record = lambda event, **fields: events.append(event)  # noqa: E731
    totals = accumulator(engine, record=record).accumulate(source)
    assert totals.num_look_ahead_tokens == 2 * 5 + 4 * 5 and totals.look_ahead_s > 0
    for row in engine.trained:
        assert_same(row.frozen, engine.expected(row))
    assert [len(row.sequences) for row in engine.frozen] == [2, 4, 2]
    assert events[:4] == ["look_ahead_start", "look_ahead_end"] * 2


def test_without_it_rows_are_as_they_were() -> None:
    engine, g = TellingEngine(), group(0, 3, 5, 5, 5, 5)
    source = Scripted(has(g, 0, 1, 2), [g])
    totals = accumulator(engine, look_ahead=False).accumulate(source)
    assert not source.was_idle and engine.frozen == []
    assert [row.frozen for row in engine.trained] == [None]
    assert totals.num_look_ahead_tokens == 0 and totals.look_ahead_s == 0


def test_nothing_of_an_earlier_update_is_used() -> None:
    """The same responses again, as in a batch that is repeated: the old policy is another one."""
    engine, g = TellingEngine(), group(0, 3, 5, 5, 5, 5)
    accumulate = accumulator(engine).accumulate
    excluded = replace(g, completions=(), scores=(), excluded="too long")
    assert accumulate(Scripted(has(g, 0, 1, 2, 3), [excluded])).num_look_ahead_tokens == 0
    assert len(engine.frozen) == 1 and engine.trained == []
    engine.weights = 1
    totals = accumulate(Scripted([g]))
    assert totals.num_look_ahead_tokens == 0 and engine.trained[0].frozen is None
    totals = accumulate(Scripted(has(g, 0, 1), [g]))
    assert totals.num_look_ahead_tokens == 10
    assert_same(engine.trained[1].frozen, engine.expected(engine.trained[1]))


def test_a_stale_result_would_be_seen() -> None:
    """What the tests above compare does depend on the weights."""
    engine, samples, g = TellingEngine(), OpenSamples(1), group(0, 3, 5)
    ahead = make(engine, samples)
    finish(samples, g, 0)
    assert ahead.work()
    engine.weights = 1
    [row] = pack([g])
    frozen = ahead.complete(row).frozen
    assert frozen is not None and frozen.old_policy is not None
    assert not torch.equal(frozen.old_policy, cast(Any, engine.expected(row).old_policy))


def test_a_sample_of_another_version_is_refused_all_the_same() -> None:
    engine, g = TellingEngine(), group(0, 3, 5, 5, 5, 5)
    source = Scripted(has(g, 0, 1, 2, 3), [g])
    source.accepted_versions = frozenset({"run:0:1"})
    with pytest.raises(OnPolicyViolation, match="run:0:0"):
        accumulator(engine).accumulate(source)
    assert len(engine.frozen) == 1 and engine.trained == []


def test_a_stop_ends_the_update_between_two_pieces_of_work() -> None:
    engine, g = TellingEngine(), group(0, 3, 5, 5, 5, 5)
    with_stop = StopRequest(grace_s=60.0)

    def stopped(samples: OpenSamples) -> None:
        source.interrupt(StopRequested("SIGTERM"))

    source = Scripted(has(g, 0, 1), stopped, [g])
    totals = accumulator(engine, stop=with_stop).accumulate(source)
    with_stop.close()
    assert isinstance(totals.interruption, StopRequested)
    assert len(engine.frozen) == 1 and engine.trained == []


# ---- when it is on -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"mode": "sync"}, False),
        ({"determinism": "strict"}, False),
        ({"wanted": False}, False),
        ({"can": False}, False),
    ],
)
def test_when_an_update_looks_ahead(changed: dict[str, Any], expected: bool) -> None:
    given = {"mode": "async", "determinism": "none", "wanted": True, "can": True} | changed
    config = SimpleNamespace(
        run=SimpleNamespace(mode=given["mode"], determinism=given["determinism"]),
        trainer=SimpleNamespace(look_ahead=given["wanted"]),
    )
    engine = SimpleNamespace(can_look_ahead=given["can"])
    assert _looks_ahead(cast(Config, config), cast(Any, engine)) is expected
