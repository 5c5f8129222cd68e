"""What is computed ahead, when, and that a row gets with it exactly what it gets without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.build.accumulation import looks_ahead
from easyrl.config import Config, TrainerConfig
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.dataloaders.producer.group_stream import GroupStream
from easyrl.dataloaders.producer.open_samples import OpenSamples
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.engines.base import MetricSums
from easyrl.metrics.event_log import ignore
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import (
    Completion,
    FrozenLogprobs,
    MicroBatch,
    Prompt,
    RolloutGroup,
    SampleKey,
    StopRequested,
)
from easyrl.trainer.accumulation import Accumulator, OnPolicyViolation
from easyrl.trainer.look_ahead import LookAhead
from easyrl.trainer.model_outputs import ModelOutputs
from tests.dataloaders.packed_rows import BUSY, PACKINGS, branch, pack, random_groups
from tests.dataloaders.rollout_parts import SumScorer, at_once
from tests.recipes import group_functions, run_settings
from tests.tiny_models import random_group
from tests.waiting import wait_until

G = 4


class TellingEngine:
    """Frozen models whose log-probability of a token depends on all that it may depend on.

    ``weights`` stands for those of the old policy; ``frozen`` keeps the rows they were run on.
    """

    device = torch.device("cpu")
    lockstep = False

    def __init__(self, *, reference: bool = True, old_policy: bool = True) -> None:
        self._has = reference, old_policy
        self.has_frozen_models = reference or old_policy
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

    def finish_backwards(self) -> list[MetricSums]:
        return []

    def prepare(self, rows: list[MicroBatch]) -> list[MicroBatch]:
        return rows

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> list[MetricSums]:
        self.trained += micro_batches
        return [MetricSums() for _ in micro_batches]


class ShapedEngine(TellingEngine):
    """What it says depends on the whole row, too, as the last bits of real models do."""

    def frozen_logprobs(self, row: MicroBatch) -> FrozenLogprobs:
        frozen = super().frozen_logprobs(row)
        shape = hash(tuple(row.input_ids.tolist())) % 1_000_003
        return FrozenLogprobs(
            *(None if v is None else v + shape for v in (frozen.reference, frozen.old_policy))
        )


def make(
    engine: TellingEngine,
    samples: OpenSamples,
    *,
    max_tokens: int = 100,
    note: Callable[[Any], object] = lambda piece: None,
    **settings: Any,
) -> LookAhead:
    def packed(groups: Sequence[RolloutGroup]) -> list[MicroBatch]:
        zeros = [np.zeros(len(group.completions), np.float32) for group in groups]
        return pack(groups, zeros, budget=max_tokens, **settings)

    return LookAhead(
        ModelOutputs(cast(Any, engine)),
        packed,
        samples,
        max_tokens=max_tokens,
        record=ignore,
        note=note,
    )


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
        before = ahead.outputs.num_ahead_tokens
        completed = ahead.outputs.complete(row)
        if completed is row:
            assert ahead.outputs.num_ahead_tokens == before and row.frozen is None
        else:
            assert_same(completed.frozen, engine.expected(row))
            assert replace(completed, frozen=None) == row
    asked = [key for row in engine.frozen for key in row.sequences]
    assert len(asked) == len(set(asked))  # no response goes through the models twice


@pytest.mark.parametrize("packing", PACKINGS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_pieces_that_are_repeated_give_the_same_bits(packing: str, data: st.DataObject) -> None:
    """By an engine that says something else of a token in a row of another shape."""
    groups = data.draw(random_groups())
    samples = OpenSamples(max((len(g.completions) for g in groups), default=0))
    masks, budget = data.draw(st.booleans()), data.draw(st.integers(10, 100))
    options: dict[str, Any] = {
        "max_tokens": budget, "packing": packing, "mask_truncated": masks
    }  # fmt: skip
    pieces: list[Any] = []
    ahead = make(ShapedEngine(), samples, note=pieces.append, **options)
    for each, number in data.draw(
        st.permutations([(g, n) for g in groups for n in range(len(g.completions))])
    ):
        finish(samples, each, number)
        if data.draw(st.booleans()):
            ahead.work()
    again_engine = ShapedEngine()
    again = make(again_engine, OpenSamples(0), **options)
    for piece in pieces:
        again.run(piece)
    assert len(again_engine.frozen) >= len(pieces)
    for row in pack(groups, mask_truncated=masks, packing=packing, budget=budget):
        first, second = ahead.outputs.complete(row), again.outputs.complete(row)
        assert (first.frozen is None) == (second.frozen is None)
        if first.frozen is not None:
            assert_same(second.frozen, first.frozen)


def test_pieces_that_are_not_repeated_give_other_bits() -> None:
    """What the test above compares does depend on the pieces."""
    g, pieces = group(0, 5, 6, 7, 8), list[Any]()
    found = []
    for first in (0, 1):
        samples = OpenSamples(3)
        ahead = make(ShapedEngine(), samples, note=pieces.append)
        finish(samples, g, first)
        assert ahead.work()
        finish(samples, g, *({0, 1, 2} - {first}))
        assert ahead.work()
        frozen = ahead.outputs.complete(pack([g])[0]).frozen
        assert frozen is not None and frozen.reference is not None
        found.append(frozen.reference)
    assert not torch.equal(*found)
    numbers = [[(p.prompt.index, list(p.completions)) for p in piece] for piece in pieces]
    assert numbers == [[(0, [0])], [(0, [1, 2])], [(0, [1])], [(0, [0, 2])]]


def test_values_of_another_response_of_that_name_are_refused() -> None:
    samples, g = OpenSamples(2), group(0, 5, 6, 7)
    ahead = make(TellingEngine(), samples)
    finish(samples, g, 0)
    assert ahead.work()
    other = replace(g.completions[0], token_ids=g.completions[0].token_ids[::-1].copy())
    assert (other.token_ids != g.completions[0].token_ids).any()
    [row] = pack([replace(g, completions=(other, g.completions[1]))])
    with pytest.raises(
        RuntimeError, match=r"SampleKey\(epoch=0, prompt=0, sample=0, part=0\).*another"
    ):
        ahead.outputs.complete(row)


def test_what_is_known_does_not_go_through_the_models_again() -> None:
    engine, samples, g = TellingEngine(), OpenSamples(3), group(0, 5, 6, 7, 8)
    ahead = make(engine, samples)
    finish(samples, g, 2, 0)
    assert ahead.work() and not ahead.work()
    assert [keys(row) for row in engine.frozen] == [[(0, 2), (0, 0)]]
    [row] = pack([g])
    assert_same(ahead.outputs.complete(row).frozen, engine.expected(row))
    assert keys(engine.frozen[-1]) == [(0, 1)] and engine.frozen[-1].num_tokens == 5 + 7
    assert ahead.outputs.num_ahead_tokens == 6 + 8
    assert ahead.outputs.complete(row) is row  # it is forgotten with its use


def test_a_row_of_which_nothing_is_known_is_left_alone() -> None:
    engine, samples = TellingEngine(), OpenSamples(1)
    ahead = make(engine, samples)
    known, other = group(0, 2, 6), group(1, 2, 6)
    finish(samples, known, 0)
    assert ahead.work()
    [row] = pack([other])
    assert ahead.outputs.complete(row) is row and ahead.outputs.num_ahead_tokens == 0


def test_a_dummy_is_nobodys_row() -> None:
    """Its key may be that of a real response."""
    engine, samples = TellingEngine(), OpenSamples(1)
    ahead = make(engine, samples)
    finish(samples, group(0, 2, 6), 0)
    assert ahead.work() and keys(engine.frozen[0]) == [(0, 0)]
    dummy = dummy_micro_batch()
    assert dummy.sequences == (SampleKey(0, 0, 0),)
    assert ahead.outputs.complete(dummy) is dummy


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


def test_responses_that_do_not_fit_make_no_piece_worth_it() -> None:
    """900 tokens that wait for a larger budget do not pay for a prompt of 300 and 5 that fit."""
    engine, samples, g = TellingEngine(), OpenSamples(3), group(0, 300, 900, 5, 200)
    ahead = make(engine, samples, max_tokens=1000)
    finish(samples, g, 0, 1)
    assert not ahead.work() and engine.frozen == []
    finish(samples, g, 2)
    assert ahead.work() and keys(engine.frozen[0]) == [(0, 1), (0, 2)]


def test_a_group_longer_than_the_budget_is_done_in_parts() -> None:
    engine, samples, g = TellingEngine(), OpenSamples(4), group(0, 4, 8, 8, 8, 60)
    ahead = make(engine, samples, max_tokens=20)
    finish(samples, g, 0, 1, 2, 3)
    while ahead.work():
        pass
    assert [keys(row) for row in engine.frozen] == [[(0, 0), (0, 1)], [(0, 2)]]
    [row] = pack([g], budget=100)
    assert_same(ahead.outputs.complete(row).frozen, engine.expected(row))


def test_responses_that_are_not_trained_are_not_computed() -> None:
    engine, samples, g = TellingEngine(), OpenSamples(2), group(0, 2, 9, 9, truncated=(0, 1))
    ahead = make(engine, samples, mask_truncated=True)
    finish(samples, g, 0)
    assert ahead.work() and not ahead.work() and engine.frozen == []


# ---- one update after another --------------------------------------------------------------------

Step = Callable[[OpenSamples], object] | list[RolloutGroup]


class Scripted:
    """A ``GroupSource``: between its groups things happen, and then the trainer is idle."""

    wait_s = load_s = 0.0
    first_group_wait_s = None
    accepted_versions = frozenset({"run:0:0"})
    recovered: frozenset[Any] = frozenset()

    def __init__(self, *script: Step, before: Sequence[Sequence[Any]] = ()) -> None:
        self._script = list(script)
        self._before = list(before)  # of each take
        self.noted: list[Any] = []
        self._error: BaseException | None = None
        self.open_samples = OpenSamples(G)
        self.was_idle = False

    def drain_ready(self, max_tokens: int, idle: Any = None) -> list[RolloutGroup]:
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

    def note_trained(self, num_tokens: int) -> None: ...

    def note_ahead(self, piece: Any) -> None:
        self.noted.append(piece)

    def ahead_of_drain(self, max_tokens: int) -> Sequence[Any]:
        return self._before.pop(0) if self._before else ()

    def complete(self) -> None: ...
    def close(self) -> None: ...
    def interrupt(self, error: BaseException) -> None:
        self._error = error


def accumulator(engine: TellingEngine, *, look_ahead: bool = True, **options: Any) -> Accumulator:
    return Accumulator(
        engine=cast(Any, engine),
        collectives=Collectives(Ranks.data_parallel(0, 1)),
        functions=group_functions(run=run_settings(50), max_tokens_per_micro_batch=100),
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
    refused = Scripted(has(g, 0, 1, 2, 3))  # its group never comes
    assert accumulate(refused).num_look_ahead_tokens == 0
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
    frozen = ahead.outputs.complete(row).frozen
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
    """A real stream with responses for two pieces; the stop comes during the first."""
    first, second = group(0, 3, 40, 40, 5, 5), group(1, 3, 40, 40, 5, 5)
    with_stop = StopRequest(grace_s=60.0)

    class Stopping(TellingEngine):
        def frozen_logprobs(self, row: MicroBatch) -> FrozenLogprobs:
            stream.interrupt(StopRequested("SIGTERM"))
            return super().frozen_logprobs(row)

    async def answers(prompt: Prompt, sample: int, version: str | None) -> Completion:
        if sample >= 2:
            await asyncio.Event().wait()
        return (first, second)[prompt.index].completions[sample]

    with LoopThread() as thread:
        rollouts = RolloutGenerator(thread, at_once(answers), SumScorer(), num_generations=G)

        def begin() -> GroupStream:
            stream = rollouts.produce([first.prompt, second.prompt], "run:0:0")
            wait_until(lambda: sum(g.num_missing for g in stream.open_samples.groups()) == 4)
            return stream

        stream = begin()
        ahead = make(TellingEngine(), stream.open_samples)
        assert ahead.work() and ahead.work() and not ahead.work()  # two pieces
        stream = begin()
        stream.accepted_versions = frozenset({"run:0:0"})
        totals = accumulator(engine := Stopping(), stop=with_stop).accumulate(stream)
    with_stop.close()
    assert isinstance(totals.interruption, StopRequested)
    assert len(engine.frozen) == 1 and engine.trained == []


def test_an_update_without_frozen_models_does_not_look_ahead() -> None:
    """The first of several without a reference: its old policy is the policy."""
    engine, g = TellingEngine(reference=False, old_policy=False), group(0, 3, 5, 5, 5, 5)
    source, events = Scripted(has(g, 0, 1, 2, 3), [g]), list[str]()
    record = lambda event, **fields: events.append(event)  # noqa: E731
    totals = accumulator(engine, record=record).accumulate(source)
    assert engine.frozen == [] and [row.frozen for row in engine.trained] == [None]
    assert events == ["micro_batch_start", "micro_batch_end"] and totals.look_ahead_s == 0
    assert not source.was_idle


def test_what_an_earlier_attempt_computed_ahead_is_repeated_before_its_take() -> None:
    """Both groups are there from the start, in one take each; the pieces cross."""
    groups = [group(0, 3, 5, 5, 5, 5), group(1, 3, 5, 5, 5, 5)]
    first = Scripted(has(groups[0], 0, 1), has(groups[1], 3, 0), [groups[0]], [groups[1]])
    engine, again = ShapedEngine(), ShapedEngine()
    accumulator(engine).accumulate(first)
    second = Scripted([groups[0]], [groups[1]], before=[first.noted, []])
    totals = accumulator(again).accumulate(second)
    assert totals.num_look_ahead_tokens == 4 * 5 and second.noted == first.noted
    assert len(again.trained) == 2
    for mine, theirs in zip(again.trained, engine.trained, strict=True):
        assert theirs.frozen is not None
        assert_same(mine.frozen, theirs.frozen)
    accumulator(plain := ShapedEngine()).accumulate(Scripted([groups[0]], [groups[1]]))
    assert [row.frozen for row in plain.trained] == [None, None]


# ---- when it is on -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"mode": "sync"}, False),
        ({"determinism": "strict"}, False),
        ({"look_ahead": False}, False),
        ({"can": False}, False),
        ({"lockstep": True}, False),  # a rank's piece of work would have all others wait
        ({"offload_reference": True}, False),
    ],
)
def test_when_an_update_looks_ahead(changed: dict[str, Any], expected: bool) -> None:
    given = {"mode": "async", "determinism": "none", "can": True, "lockstep": False} | changed
    trainer = ("look_ahead", "offload_reference")
    config = SimpleNamespace(
        run=SimpleNamespace(mode=given["mode"], determinism=given["determinism"]),
        trainer=TrainerConfig(**{name: given[name] for name in trainer if name in given}),
    )
    engine = SimpleNamespace(can_look_ahead=given["can"], lockstep=given["lockstep"])
    assert looks_ahead(cast(Config, config), cast(Any, engine)) is expected
