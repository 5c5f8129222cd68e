"""The demo's task: add two four-digit numbers, thinking column by column or not at all.

The numbers 1000–9999 are divided once and for all into three disjoint sets: what the warm start shows, what
the reinforcement learning asks, and what the evaluation asks. Both operands of a problem come from the
same set, so a held-out problem has no operand that was ever trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

THINK, END_THINK = "<think>", "</think>"
NUM_WARM_START_OPERANDS, NUM_TRAIN_OPERANDS = 4000, 3000  # of 9000; the other 2000 are held out


@dataclass(frozen=True, slots=True)
class Problem:
    """``first + second``, both with four digits."""

    first: int
    second: int

    @property
    def prompt(self) -> str:
        return f"{self.first}+{self.second}"

    @property
    def answer(self) -> str:
        return str(self.first + self.second)


class OperandSplit(NamedTuple):
    """Three disjoint sets of numbers, each sorted."""

    warm_start: tuple[int, ...]
    train: tuple[int, ...]
    heldout: tuple[int, ...]


def split_operands() -> OperandSplit:
    """The division of 1000–9999. It takes no seed: a model and a data set made with different seeds must not
    disagree about what is held out."""
    numbers = list(range(1000, 10000))
    random.Random("easyrl demo operands").shuffle(numbers)
    train_end = NUM_WARM_START_OPERANDS + NUM_TRAIN_OPERANDS
    return OperandSplit(
        warm_start=tuple(sorted(numbers[:NUM_WARM_START_OPERANDS])),
        train=tuple(sorted(numbers[NUM_WARM_START_OPERANDS:train_end])),
        heldout=tuple(sorted(numbers[train_end:])),
    )


def draw_problems(numbers: tuple[int, ...], count: int, rng: random.Random) -> list[Problem]:
    """``count`` different problems over ``numbers``. Raises ``ValueError`` if there are not so many."""
    num_pairs = len(numbers) ** 2
    if count > num_pairs:
        raise ValueError(f"{count} different problems asked for, {len(numbers)} numbers make {num_pairs}")
    pairs = (divmod(pair, len(numbers)) for pair in rng.sample(range(num_pairs), count))
    return [Problem(numbers[first], numbers[second]) for first, second in pairs]


def direct_response(problem: Problem) -> str:
    """The answer without a thought: short, and hard for a small model."""
    return f"{THINK}{END_THINK}{problem.answer}"


def scratchpad_response(problem: Problem) -> str:
    """The answer after the columns from the right, with carries: ``7+6=13;4+8+1=13;3+5+1=9;1+2=3``."""
    columns = []
    carry = 0
    for place in (1, 10, 100, 1000):
        terms = [problem.first // place % 10, problem.second // place % 10, carry]
        total = sum(terms)
        columns.append("+".join(map(str, terms if carry else terms[:2])) + f"={total}")
        carry = total // 10
    return f"{THINK}{';'.join(columns)}{END_THINK}{problem.answer}"


def warm_start_examples(seed: int, direct_fraction: float) -> Iterator[tuple[str, str]]:
    """Endless (question, response) pairs, all answers right; a share of them without a scratchpad."""
    numbers = split_operands().warm_start
    rng = random.Random(f"easyrl demo warm start {seed}")
    while True:
        problem = Problem(rng.choice(numbers), rng.choice(numbers))
        direct = rng.random() < direct_fraction
        yield problem.prompt, direct_response(problem) if direct else scratchpad_response(problem)


def write_splits(
    directory: Path, seed: int, num_train: int = 20_000, num_heldout: int = 1000
) -> tuple[Path, Path]:
    """Writes ``train.jsonl`` and ``heldout.jsonl`` (fields ``prompt``, ``answer``); returns their paths.

    Raises ``ValueError`` if more problems are asked for than a split has.
    """
    operands = split_operands()
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, numbers, count in (
        ("train", operands.train, num_train),
        ("heldout", operands.heldout, num_heldout),
    ):
        problems = draw_problems(numbers, count, random.Random(f"easyrl demo {name} {seed}"))
        path = directory / f"{name}.jsonl"
        with path.open("w") as file:
            for problem in problems:
                file.write(json.dumps({"prompt": problem.prompt, "answer": problem.answer}) + "\n")
        paths.append(path)
    return paths[0], paths[1]
