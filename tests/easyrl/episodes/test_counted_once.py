"""An episode counts once, and only what was sampled counts, wherever its parts are put together"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from easyrl.dataloaders.packing.groups import pack_groups
from easyrl.dataloaders.producer.open_samples import OpenSamples
from easyrl.engines.base import ResponseDifference
from easyrl.episodes.branches import tokens_by_part
from easyrl.metrics.batch_metrics import BatchTotals
from easyrl.metrics.group_counts import GroupCounts
from easyrl.recipes import DAPO, GRPO, GSPO, PPO
from easyrl.recipes.groups import trained_group, trained_groups
from easyrl.recipes.losses import terms_of
from easyrl.samples.records import sampled_group
from easyrl.samples.show import response_heading
from easyrl.schema import FrozenLogprobs, MicroBatch, RolloutGroup, SampleKey
from easyrl.trainer.look_ahead import LookAhead
from easyrl.trainer.model_outputs import ModelOutputs
from tests.easyrl.episodes.trees import Logged, episode, group, typical
from tests.recipes import group_functions, run_settings

RUN = run_settings(8, num_generations=2)
ADVANTAGES = np.array([1.5, -0.5])


def two_episodes() -> RolloutGroup:
    rng = np.random.default_rng(5)
    return group(*(episode(*typical(rng, [10, 11, 12, 13]), reward=r) for r in (1.0, 0.0)))


def whole_row(recipe: GRPO, of: RolloutGroup) -> MicroBatch:
    trained = trained_group(recipe, of, ADVANTAGES, RUN)
    (row,) = pack_groups([trained], max_tokens_per_micro_batch=500, packing="tree")
    return row


def test_the_parts_of_an_episode_are_one_sequence_of_the_loss() -> None:
    row = whole_row(GRPO(kl_coef=0.0), two_episodes())
    assert row.num_sequences > 2  # each part has an endpoint of its own
    assert {key.part for key in row.sequences} != {0}
    logprobs = torch.zeros(row.num_loss_tokens, dtype=torch.float64)
    terms = terms_of(row, FrozenLogprobs(None, None), logprobs)
    assert terms.sequences == (SampleKey(0, 0, 0), SampleKey(0, 0, 1))
    assert bool((terms.sequence_index.diff() >= 0).all())  # adjacent
    assert terms.group_of_sequence.tolist() == [0, 0]


def test_the_ratio_of_gspo_is_that_of_the_whole_episode() -> None:
    of = two_episodes()
    row = whole_row(GSPO(), of)
    logprobs = torch.from_numpy(np.random.default_rng(0).normal(-2, 0.1, row.num_loss_tokens))
    old = torch.from_numpy(np.random.default_rng(1).normal(-2, 0.1, row.num_loss_tokens))
    terms = terms_of(row, FrozenLogprobs(None, old), logprobs)
    ratio = GSPO().ratio(logprobs, terms)
    sample = torch.tensor([row.sequences[q].sample for q in row.sequence_index.tolist()])
    for number, completion in enumerate(of.completions):
        own = sample == number
        assert int(own.sum()) == completion.loss_mask.sum()
        expected = float((logprobs - old)[own].mean().exp())
        assert ratio[own].tolist() == pytest.approx([expected] * int(own.sum()), rel=1e-12)


def test_an_episode_weighs_as_much_as_another_of_fewer_turns() -> None:
    rng = np.random.default_rng(0)
    of = group(episode(*typical(rng, [10, 11])), episode(Logged([10, 11], [3, 4])))
    recipe = GRPO(kl_coef=0.0)
    (trained,) = trained_groups(recipe, RUN, [of])
    assert [r.loss_weights.sum() for r in trained.responses] == pytest.approx([1.0, 1.0])
    assert recipe.denominator([of], RUN) == 2
    assert GRPO(aggregation="token").denominator([of], RUN) == sum(
        int(c.loss_mask.sum()) for c in of.completions
    )


def test_the_punishment_of_dapo_looks_at_the_longest_turn() -> None:
    short = episode(*[Logged([10, n], [3] * 4) for n in range(9)])
    long = episode(Logged([10] * 30, [3] * 8))
    rewards = DAPO().rewards(group(short, long), RUN)  # L_max 8, punished behind 6.4 tokens
    assert rewards.tolist() == [1.0, 0.0]


def test_lengths_are_of_what_was_sampled() -> None:
    of, totals = two_episodes(), BatchTotals()
    totals.add_counts(GroupCounts.of(of))
    sums = totals.metrics.sums
    assert sums["responses"] == 2
    assert sums["response_tokens"] == sum(int(c.loss_mask.sum()) for c in of.completions)
    assert sums["sequence_tokens"] == sum(len(c.token_ids) for c in of.completions)


def test_no_episode_is_split_where_the_loss_couples_its_tokens() -> None:
    trained = trained_group(GSPO(), two_episodes(), ADVANTAGES, RUN)
    rows = pack_groups([trained], max_tokens_per_micro_batch=40, packing="tree", whole_groups=True)
    assert len(rows) == 1 and rows[0].num_tokens > 40
    # without that it would be: the parts of one sample stand in several rows
    split = pack_groups([trained], max_tokens_per_micro_batch=40, packing="tree")
    rows_of = [{key.sample for key in row.sequences} for row in split]
    assert sum(map(len, rows_of)) > 2


@pytest.mark.parametrize("budget", [40, 60, 80])
def test_rows_of_episodes_keep_to_the_budget(budget: int) -> None:
    """Though their parts begin with prompts of many lengths, most of which nobody shares."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        of = group(*(episode(*typical(rng, [10, 11, 12, 13]), reward=r) for r in (1.0, 0.0)))
        trained = trained_group(GRPO(kl_coef=0.0), of, ADVANTAGES, RUN)
        rows = pack_groups([trained], max_tokens_per_micro_batch=budget, packing="tree")
        assert max(row.num_tokens for row in rows) <= budget


class Engine:
    """A critic whose value of a token is its id."""

    def __init__(self) -> None:
        self.asked: list[SampleKey] = []

    def prepare(self, rows: list[MicroBatch]) -> list[MicroBatch]:
        return list(rows)

    def frozen_logprobs(self, row: MicroBatch) -> FrozenLogprobs:
        self.asked += row.sequences
        return FrozenLogprobs(None, None, row.label_ids.float())


def test_what_a_critic_says_stands_at_the_sampled_tokens_and_each_part_is_asked_once() -> None:
    of, engine = two_episodes(), Engine()
    functions = group_functions(PPO(), RUN, max_tokens_per_micro_batch=500)
    assert functions.ask_first is not None
    outputs = ModelOutputs(cast(Any, engine))
    for _ in range(2):
        (said,) = outputs.of_groups([of], functions.ask_first)
        for completion, values in zip(of.completions, said.values, strict=True):
            expected = np.where(completion.loss_mask, completion.token_ids, 0)
            assert values.tolist() == expected.tolist()
    assert len(engine.asked) == len(set(engine.asked)) > 2
    (row,) = functions.pack_finished([of])
    complete = outputs.complete(row)
    assert complete.frozen is not None and complete.frozen.values is not None
    assert complete.frozen.values.tolist() == row.label_ids.tolist()


def test_responses_of_an_open_group_are_run_ahead_and_found_again() -> None:
    of, engine = two_episodes(), Engine()
    functions = group_functions(PPO(), RUN, max_tokens_per_micro_batch=500)
    outputs = ModelOutputs(cast(Any, engine))
    open_samples = OpenSamples(2)
    open_samples.add(of.prompt, 1, of.completions[1])
    ahead = LookAhead(
        outputs, functions.pack_finished, open_samples, 500, lambda *_, **__: None, lambda _: None
    )
    assert ahead.work() and {key.sample for key in engine.asked} == {1}
    (row,) = functions.pack_finished([of])
    complete = outputs.complete(row)
    assert complete.frozen is not None and complete.frozen.values is not None
    assert complete.frozen.values.tolist() == row.label_ids.tolist()
    assert len(engine.asked) == len(set(engine.asked)) == row.num_sequences
    assert outputs.num_ahead_tokens == of.completions[1].loss_mask.sum()


def test_a_kept_sample_has_its_parts_differences_in_the_order_of_its_tokens() -> None:
    of = two_episodes()
    trained = trained_group(GRPO(kl_coef=0.0), of, ADVANTAGES, RUN)
    compared = {}
    for response in trained.responses:
        completion = of.completions[response.sample]
        for part, chosen in tokens_by_part(completion, response.tokens).items():
            key = SampleKey(0, 0, response.sample, part)
            own = tuple(float(place) for place in response.tokens[chosen])  # its own place
            compared[key] = ResponseDifference(key, len(own), sum(own), own)
    kept = sampled_group(1, trained, "drawn", compared, skipped=False)
    for completion, response in zip(of.completions, kept.responses, strict=True):
        assert (response.num_turns, response.num_branches) == (7, 5)
        sampled = [own is not None for own in response.logprobs]
        assert sampled == completion.loss_mask.tolist()
        assert [own is not None for own in response.token_advantages] == sampled
        assert "7 turns in 5 branches" in response_heading(0, response)
        places = np.flatnonzero(completion.loss_mask)
        assert response.logprob_diff == pytest.approx(float(places.mean()))
        for place, own in enumerate(response.token_logprob_diffs):
            assert own == (pytest.approx(place, rel=1e-2) if place in places else None)
