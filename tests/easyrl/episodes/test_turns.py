"""Trained tokens are sampled tokens: an episode's tree against what its endpoints have logged."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyrl.completion_check import CompletionLimits, completion_problem
from easyrl.dataloaders.packing.episodes import branch_parts
from easyrl.schema import Completion
from tests.dataloaders.packed_rows import BUSY
from tests.easyrl.episodes.trees import Logged, episode, random_tokens, records_of, typical

LIMITS = CompletionLimits(vocab_size=64)


def paths(made: Completion) -> list[tuple[list[int], list[int]]]:
    """What each turn was shown and has sampled, as the tree says it."""
    assert made.episode is not None
    turns, ids = made.episode.turns, made.token_ids.tolist()
    found = []
    for turn in turns:
        before: list[int] = []
        ancestor = turn.parent
        while ancestor is not None:
            above = turns[ancestor]
            before = ids[above.start : above.end] + before
            ancestor = above.parent
        found.append((before + ids[turn.start : turn.sampled], ids[turn.sampled : turn.end]))
    return found


def expected(logged: list[Logged]) -> list[tuple[list[int], list[int]]]:
    return [(each.prompt, each.sampled) for each in logged]


def test_branches_of_a_typical_episode():
    logged = typical(np.random.default_rng(0), [10, 11, 12, 13])
    made = episode(*logged)
    assert made.episode is not None
    one, two, agent, three, retry, anew, cut = (turn.parent for turn in made.episode.turns)
    assert (one, two, three) == (None, 0, 1)
    # nothing of them is aligned: neither a sub-agent, nor other tokens of the same text, nor a
    # history without its middle
    assert (agent, anew, cut) == (None, None, None)
    assert retry == 0  # beside the second turn
    assert made.episode.num_branches == 5
    assert paths(made) == expected(logged)
    assert completion_problem(made, LIMITS) is None


@st.composite
def conversations(draw: st.DrawFn) -> list[Logged]:
    """Turns that continue, repeat, cut and garble what was said before; two token ids, so that
    they often coincide."""
    ids = st.lists(st.integers(0, 1), min_size=1, max_size=4)
    logged: list[Logged] = []
    for _ in range(draw(st.integers(1, 7))):
        prompt = draw(ids)
        if logged and draw(st.booleans()):
            before = draw(st.sampled_from(logged))
            whole = [*before.prompt, *before.sampled]
            prompt = whole[: draw(st.integers(1, len(whole)))] + draw(st.one_of(st.just([]), ids))
        logged.append(Logged(prompt, draw(ids), draw(st.sampled_from(["http://a", "http://b"]))))
    return logged


@BUSY
@given(conversations())
def test_every_turn_is_what_was_logged_and_each_sampled_token_is_trained_once(logged):
    made = episode(*logged)
    assert paths(made) == expected(logged)
    assert completion_problem(made, LIMITS) is None
    sampled = [token for each in logged for token in each.sampled]
    assert made.token_ids[made.loss_mask].tolist() == sampled
    tokens = np.flatnonzero(made.loss_mask)
    parts = branch_parts(made, tokens)
    assert sorted(itertools.chain(*(part.chosen.tolist() for part in parts))) == list(
        range(len(tokens))
    )
    told = {(tuple(each.prompt), tuple(each.sampled), each.url) for each in logged}
    shown = {
        (tuple(prompt) + tuple(answer[:k]), answer[k], url)
        for prompt, answer, url in told
        for k in range(len(answer))
    }
    for part in parts:
        for place, token in zip(part.trained.tolist(), part.chosen.tolist(), strict=True):
            assert part.token_ids[place] == made.token_ids[tokens[token]]
            before = tuple(part.token_ids[:place].tolist())
            assert (before, int(part.token_ids[place]), part.endpoint) in shown
        assert part.trained[-1] == len(part.token_ids) - 1  # nothing behind it is computed


def test_a_part_of_the_tokens():
    """Those that a recipe leaves out leave the numbers of the others as they were."""
    made = episode(*typical(np.random.default_rng(1), [10, 11, 12, 13]))
    assert made.episode is not None
    tokens = np.flatnonzero(made.loss_mask)
    whole = branch_parts(made, tokens)
    some = branch_parts(made, tokens[tokens >= made.episode.turns[-2].start])
    assert {part.number for part in some} < {part.number for part in whole}
    by_number = {part.number: part for part in whole}
    for part in some:
        assert set(part.trained.tolist()) <= set(by_number[part.number].trained.tolist())


def test_an_episode_whose_mask_or_tree_is_wrong_is_refused():
    logged = typical(np.random.default_rng(2), [10, 11, 12, 13])
    made = episode(*logged)
    assert made.episode is not None
    mask = made.loss_mask.copy()
    mask[0] = True  # the environment's
    turns = made.episode.turns
    wrong = [
        (dict(loss_mask=mask), "loss_mask"),
        (dict(token_ids=made.token_ids + 60), "the policy's vocabulary"),
        (dict(episode=_with(made, turns[:-1])), "tokens, its turns have"),
        (dict(episode=_with(made, (turns[0], *turns[2:]))), "do not follow"),
        (dict(episode=_with(made, (turns[0]._replace(parent=3), *turns[1:]))), "not before it"),
        (dict(version_spans=made.version_spans[1:]), "turn 0: weight_versions"),
        (dict(logprobs=np.full_like(made.logprobs, np.nan)), "turn 0: logprobs"),
    ]

    for changed, said in wrong:
        assert said in str(completion_problem(replace(made, **changed), LIMITS))


def _with(made: Completion, turns):

    assert made.episode is not None
    return replace(made.episode, turns=turns)


@pytest.mark.parametrize("length", [1, 3])
def test_a_single_turn_is_a_response_with_its_prompt(length: int):
    rng = np.random.default_rng(3)
    prompt, answer = random_tokens(rng, 4), random_tokens(rng, length)
    made = episode(Logged(prompt, answer))
    assert made.token_ids.tolist() == prompt + answer
    assert made.loss_mask.tolist() == [False] * 4 + [True] * length
    assert [tuple(span)[1:] for span in made.version_spans] == [(4, 4 + length)]


def test_records_are_as_long_as_the_tree_however_often_a_history_is_sent():
    """A hundred turns, each of which is shown all that came before."""
    rng = np.random.default_rng(4)
    shown, logged = random_tokens(rng, 50), []
    for _ in range(100):
        logged.append(Logged(list(shown), random_tokens(rng, 10)))
        shown += [*logged[-1].sampled, *random_tokens(rng, 20)]
    records = records_of(*logged)
    assert [record.parent for record in records] == [None, *range(99)]
    kept = sum(len(record.new_ids) + len(record.token_ids) for record in records)
    assert kept == len(shown) - 20
    assert all(record.new_ids.base is None for record in records)  # no view keeps a whole prompt
    assert paths(episode(*logged)) == expected(logged)


@BUSY
@given(conversations())
def test_a_prompt_continues_the_longest_that_it_begins_with_and_of_equal_ones_the_newest(logged):
    records = records_of(*logged)
    wholes = [each.prompt + each.sampled for each in logged]
    for number, (each, record) in enumerate(zip(logged, records, strict=True)):
        begun = [
            (len(whole), place)
            for place, whole in enumerate(wholes[:number])
            if each.prompt[: len(whole)] == whole
        ]
        assert (record.num_before, record.parent) == max(begun, default=(0, None))
