"""What models are asked before the advantages: of which responses, once, and whose row gets it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np

from easyrl.recipes import GRPO, PFPPO, PPO, Recipe
from easyrl.schema import FrozenLogprobs, MicroBatch, RolloutGroup, SampleKey
from easyrl.trainer.model_outputs import ModelOutputs, ResponseRows
from tests.recipes import group_functions, run_settings
from tests.tiny_models import random_group

RUN = run_settings(50, num_generations=5)


class Engine:
    """A critic whose value of a token is its id, and a reference that says its negative."""

    def __init__(self, *, sharded: bool = False) -> None:
        self.asked: list[SampleKey] = []
        self._sharded = sharded

    def prepare(self, rows: list[MicroBatch]) -> list[MicroBatch]:
        return list(rows)

    def frozen_logprobs(self, row: MicroBatch) -> FrozenLogprobs:
        self.asked += row.sequences
        values = row.label_ids.float()
        return FrozenLogprobs(None if self._sharded else -values, None, values)


def make(recipe: Recipe, **settings: Any) -> tuple[Engine, ModelOutputs, ResponseRows]:
    engine = Engine(**settings)
    rows = group_functions(recipe, RUN, max_tokens_per_micro_batch=40).ask_first
    assert rows is not None
    return engine, ModelOutputs(cast(Any, engine)), rows


def group(index: int, *lengths: int, masked: float = 0.0) -> RolloutGroup:
    return random_group(np.random.default_rng(index), 3, list(lengths), index=index, masked=masked)


def packed(groups: list[RolloutGroup], recipe: Recipe) -> list[MicroBatch]:
    functions = group_functions(recipe, RUN, max_tokens_per_micro_batch=100)
    return functions.pack_finished(groups)


def test_values_stand_where_their_tokens_are() -> None:
    engine, outputs, rows = make(PPO())
    groups = [group(0, 4, 6, masked=0.5), group(1, 5)]
    for own, said in zip(groups, outputs.of_groups(groups, rows), strict=True):
        for completion, values, reference in zip(
            own.completions, said.values, said.reference_logprobs, strict=True
        ):
            expected = np.where(completion.loss_mask, completion.token_ids, 0)
            assert values.dtype == np.float32 and values.tolist() == expected.tolist()
            assert reference.tolist() == (-expected).tolist()
    assert len(engine.asked) == 3


def test_only_selected_responses_are_run_and_none_twice() -> None:
    recipe = PFPPO(filter="best_worst")
    engine, outputs, rows = make(recipe)
    made = group(0, 4, 5, 6, 7, 8)
    first, last = sorted(recipe.select(made, RUN))
    (ahead, *_) = packed([replace(made, completions=made.completions[:1])], recipe)
    outputs.run([replace(ahead, sequences=(SampleKey(0, 0, first),))], ahead=True)
    (said,) = outputs.of_groups([made], rows)
    assert [key.sample for key in engine.asked] == [first, last]
    assert [v.any() for v in said.values] == [i in (first, last) for i in range(5)]
    outputs.of_groups([made], rows)
    assert len(engine.asked) == 2


def test_a_row_is_completed_with_what_its_responses_were_told() -> None:
    engine, outputs, rows = make(PPO())
    groups = [group(0, 4, 6), group(1, 5, 2)]
    outputs.of_groups(groups, rows)
    (row,) = packed(groups, PPO())
    frozen = outputs.complete(row).frozen
    assert frozen is not None and frozen.values is not None and frozen.reference is not None
    assert frozen.values.equal(row.label_ids.float()) and frozen.reference.equal(-frozen.values)
    assert len(engine.asked) == 4 and outputs.num_ahead_tokens == 0


def test_sharded_models_are_left_to_the_training_forward() -> None:
    _, outputs, rows = make(PPO(kl_coef=0.1), sharded=True)
    groups = [group(0, 4, 6)]
    (said,) = outputs.of_groups(groups, rows)
    assert all(values.any() for values in said.values)
    (row,) = packed(groups, PPO())
    frozen = outputs.complete(row).frozen
    assert frozen is not None and frozen.reference is None and frozen.values is not None


def test_a_group_without_a_trained_token_is_asked_nothing() -> None:
    engine, outputs, rows = make(PPO())
    (said,) = outputs.of_groups([group(0, 4, 6, masked=1.0)], rows)
    assert engine.asked == [] and [v.tolist() for v in said.values] == [[0.0] * 4, [0.0] * 6]
    trained = group_functions(PPO(), RUN).trained([group(0, 4, 6, masked=1.0)], [], [said])
    assert trained[0].responses == ()


def test_a_recipe_without_a_critic_asks_nobody() -> None:
    assert group_functions(GRPO(), RUN).ask_first is None
    assert group_functions(GRPO(), RUN).value_denominator is None
    functions = group_functions(PPO(), RUN)
    assert functions.value_denominator is not None
    assert functions.value_denominator([group(0, 4, 6)]) == 10
