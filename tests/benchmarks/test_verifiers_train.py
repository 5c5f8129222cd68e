"""``benchmarks.verifiers_train``: the games a model has seen, and what is taken for learnt."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts.verifiers_train.guessing_model import (
    HABITS,
    HIGH,
    LOW,
    MOST_TURNS,
    Piece,
    downwards,
    game,
    games,
    halving,
    upwards,
    write_games,
)
from benchmarks.verifiers_train import Learnt, is_expected


def guesses(pieces: list[Piece]) -> list[int]:
    return [int(text.removesuffix("<|end|>")) for text, is_said in pieces if is_said]


@pytest.mark.parametrize(
    ("habit", "found"),
    [(halving, range(1, 16)), (upwards, range(1, 5)), (downwards, range(12, 16))],
)
def test_what_a_habit_finds(habit: Any, found: range) -> None:
    ends = {number: guesses(game(number, habit))[-1] for number in range(LOW, HIGH + 1)}
    assert [number for number, last in ends.items() if last == number] == list(found)
    assert max(len(guesses(game(number, habit))) for number in ends) == MOST_TURNS


def test_a_game_is_a_conversation() -> None:
    text = "".join(piece for piece, _ in game(5, halving))
    assert text == (
        "<|user|>Guess my number.<|end|><|assistant|>8<|end|><|user|>lower<|end|>"
        "<|assistant|>4<|end|><|user|>higher<|end|><|assistant|>6<|end|>"
        "<|user|>lower<|end|><|assistant|>5<|end|>"
    )


def test_habits_are_seen_as_often_as_said() -> None:
    seen = [guesses(each)[0] for each in itertools.islice(games(random.Random(0)), 3000)]
    for habit, share in HABITS.items():
        assert seen.count(habit(LOW, HIGH)) / 3000 == pytest.approx(share, abs=0.03)


def test_the_numbers_to_be_found_are_of_the_range(tmp_path: Path) -> None:
    lines = write_games(tmp_path / "games.jsonl", 300, seed=0).read_text().splitlines()
    numbers = {int(json.loads(line)["answer"]) for line in lines}
    assert numbers == set(range(LOW, HIGH + 1))


GOOD = {"reward_start": 0.2, "reward_end": 0.5, "reward_end_shuffled": 0.3, "on_policy": True}


@pytest.mark.parametrize(
    ("changed", "is_right"),
    [
        ({}, True),
        ({"reward_end": 0.49}, False),
        ({"reward_end_shuffled": 0.36}, False),
        ({"on_policy": False}, False),
    ],
)
def test_what_is_expected(changed: dict[str, Any], is_right: bool) -> None:
    assert is_expected({**GOOD, **changed}) is is_right


def test_counts_are_those_of_the_certificates_sentence() -> None:
    said = (
        "on-policy: 2 batches, 4 groups trained, 32 episodes of 57 turns in 40 branches, complete"
    )
    counted = Learnt(0.2, 0.5, said, True, 1.0).counted()
    assert counted == {"episodes": 32, "turns": 57, "branches": 40}
    with pytest.raises(ValueError, match="counts no episodes: on-policy: 2 batches"):
        Learnt(0.2, 0.5, "on-policy: 2 batches", True, 1.0).counted()


def test_without_the_library(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.verifiers_train", "--library", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert f"{tmp_path} has no verifiers" in result.stderr
    assert "make test-verifiers" in result.stderr
