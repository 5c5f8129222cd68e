"""Hostile episodes: which are planned, and that each untruth about a trained one is found."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import benchmarks.parts.hostile.episodes.environment  # noqa: F401 (fills the catalogue)
from benchmarks.parts.hostile.episodes.accounts import (
    GATEWAY_DIED,
    EpisodeAccounts,
    compare_reward,
    compare_trained,
    compare_with_calm,
    told_by,
)
from benchmarks.parts.hostile.episodes.catalogue import BEHAVIOURS
from benchmarks.parts.hostile.episodes.plan import (
    PlannedPrompt,
    plan_episodes,
    plan_prompts,
    write_episode_prompts,
)
from benchmarks.parts.hostile.episodes.scene import reward_of
from easyrl.episodes.turns import TurnRecord, episode_completion, failed_at_once
from easyrl.runtime.seeding import sample_seed
from easyrl.schema import Completion, Prompt
from tests.easyrl.episodes.parts import IDS, sampled

TURN = (tuple(IDS.tolist()), (8, 9))


def test_there_are_behaviours_of_each_kind_and_end() -> None:
    assert len(BEHAVIOURS) > 20
    assert {each.kind for each in BEHAVIOURS.values()} == {
        "life", "process", "request", "reward", "socket", "tool"
    }  # fmt: skip
    assert {each.ends for each in BEHAVIOURS.values()} == {
        "counts", "fails", "silent", "rejected", "excluded"
    }  # fmt: skip


def test_each_behaviour_is_in_one_run_and_prompts_are_whole_batches(tmp_path: Path) -> None:
    plans = plan_episodes(list(BEHAVIOURS.values()), 4, 0)
    names = Counter(each.name for plan in plans for each in plan.behaviours)
    assert names == dict.fromkeys(BEHAVIOURS, 1)
    for plan in plans:
        prompts = plan_prompts(plan, 8, 5)
        replaced = [prompt for prompt in prompts if prompt.is_replaced]
        assert len(prompts) == 40 + len(replaced)
        data = write_episode_prompts(tmp_path / "data.jsonl", prompts, tmp_path, 7)
        for index, line in enumerate(data.read_text().splitlines()):
            record, prompt = json.loads(line), prompts[index]
            assert record["acting"] == [sample_seed(7, 0, index, n) for n in prompt.acting]
            name = "" if prompt.behaviour is None else prompt.behaviour.name
            assert record["behaviour"] == name and bool(name) == bool(prompt.acting)


def episode(failure: str | None = None) -> Completion:
    made = sampled(np.array(TURN[1]))
    return episode_completion([TurnRecord(IDS, made)], "wild", 0.0, failure=failure)


@pytest.mark.parametrize(
    ("behaviour", "completion", "told", "problem"),
    [
        (None, episode(), {TURN: 1}, None),
        (None, episode(), {(TURN[0], (8, 10)): 1}, "not trained as told"),
        (None, episode(), {TURN: 2}, "not trained as told"),
        (None, episode(), {}, "that nobody saw"),
        (None, episode("it broke"), {TURN: 1}, "failure is 'it broke'"),
        (None, failed_at_once("wild", GATEWAY_DIED), {TURN: 1}, None),
        ("hangs", episode("it hung"), {}, None),
        ("hangs", episode(), {TURN: 1}, "failure is None"),
        ("raises-before-it-asks", failed_at_once("wild", "it broke"), {TURN: 1}, None),
        ("raises-before-it-asks", episode("it broke"), {}, "that nobody saw"),
        ("floods", episode(), {}, None),
        (
            "floods",
            replace(episode(), loss_mask=np.ones(len(IDS) + 2, dtype=bool)),
            {TURN: 1},
            "not what was sampled",
        ),
    ],
)
def test_what_is_trained_otherwise_than_told_is_found(
    behaviour: str | None, completion: Completion, told: dict, problem: str | None
) -> None:
    kept = EpisodeAccounts()
    chosen = None if behaviour is None else BEHAVIOURS[behaviour]
    planned = PlannedPrompt(chosen, () if chosen is None else (1,))
    compare_trained(kept, 3, planned, 1, Prompt(3, IDS, "", None), completion, Counter(told))
    found = kept.wrong + kept.problems
    if problem is None:
        assert not found
    else:
        assert problem in found[0]


def test_only_the_last_session_of_an_episode_counts(tmp_path: Path) -> None:
    lines = [
        {"seed": 1, "session": "a", "prompt_ids": [1], "token_ids": [2]},
        {"seed": 2, "session": "b", "prompt_ids": [1], "token_ids": [2]},
        {"seed": 1, "session": "c", "prompt_ids": [3], "token_ids": [4]},
        {"seed": 1, "session": "c", "prompt_ids": [3], "token_ids": [4]},
    ]
    file = tmp_path / "answered.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert told_by(file) == {1: {((3,), (4,)): 2}, 2: {((1,), (2,)): 1}}


def test_rewards_are_what_the_environment_gave_and_the_calm_run_had() -> None:
    def problems(reward: float, calm: dict[tuple[int, int], float]) -> list[str]:
        kept = EpisodeAccounts(first_rewards={(3, 1): reward, (4, 0): 0.0})
        compare_reward(kept, 3, PlannedPrompt(None, ()), 1, reward, Counter({TURN: 2}))
        assert compare_with_calm(kept, calm) == len(calm)
        return kept.wrong + kept.problems

    given = reward_of(TURN[1] * 2)
    assert problems(given, {(3, 1): given}) == []
    (wrong,) = problems(given + 1, {(3, 1): given + 1})
    assert wrong.endswith(f"reward {given + 1:g}, and its environment gave {given:g}")
    (other,) = problems(given, {(3, 1): given + 1, (4, 0): 0.0})
    assert other.endswith(f"sample 1: reward {given:g}, {given + 1:g} in the calm run")
    assert problems(given, {}) == ["no reward of the first batch is one of the calm run's, too"]
