"""The demo's task: add two three-digit numbers; the answer has to be exact.

The warm start shows three habits of answering, as a corpus of mixed quality would: a quick
estimate, sums by columns that forget the carries, and sums by columns that are careful. Only the
reward tells them apart.

The numbers 100–999 are divided once and for all into three disjoint sets: what the warm start
shows, what the reinforcement learning asks, and what the evaluation asks. Both operands of a
problem come from the same set, so a held-out problem has no operand that was ever trained on.

``python -m easyrl.demo.task --output DIR [--seed N]`` writes the prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

THINK, END_THINK = "<think>", "</think>"
NUM_WARM_START_OPERANDS, NUM_TRAIN_OPERANDS = 400, 300  # of 900; the other 200 are held out


class Problem(NamedTuple):
    """``first + second``, both with three digits."""

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
    """The division of 100–999.

    It takes no seed: a model and data made with different seeds must agree on what is held out.
    """
    numbers = list(range(100, 1000))
    random.Random("easyrl demo operands").shuffle(numbers)
    ends = (0, NUM_WARM_START_OPERANDS, NUM_WARM_START_OPERANDS + NUM_TRAIN_OPERANDS, len(numbers))
    return OperandSplit(*(tuple(sorted(numbers[start:end])) for start, end in pairwise(ends)))


def draw_problems(numbers: tuple[int, ...], count: int, rng: random.Random) -> list[Problem]:
    """``count`` different problems over ``numbers``; ``ValueError`` if there are not so many."""
    base = len(numbers)
    if count > base**2:
        raise ValueError(f"{count} different problems asked for, {base} numbers make {base**2}")
    pairs = (divmod(pair, base) for pair in rng.sample(range(base**2), count))
    return [Problem(numbers[first], numbers[second]) for first, second in pairs]


def estimate_response(problem: Problem) -> str:
    """No thought, and the sum to the nearest ten (halves up): exact for one problem in ten."""
    estimate = (problem.first + problem.second + 5) // 10 * 10
    return f"{THINK}{END_THINK}{estimate}"


def columns_response(problem: Problem, carries: bool) -> str:
    """The columns from the right, then the answer read off them.

    With carries ``347+586`` is ``7+6=13;4+8+1=13;3+5+1=9`` and 933. Without, it is
    ``7+6=13;4+8=12;3+5=8`` and 823: right only where nothing had to be carried.
    """
    columns: list[str] = []
    answer, carry = "", 0
    for place in (1, 10, 100):
        terms = [problem.first // place % 10, problem.second // place % 10]
        if carry and carries:
            terms.append(carry)
        total = sum(terms)
        columns.append("+".join(map(str, terms)) + f"={total}")
        answer = str(total if place == 100 else total % 10) + answer
        carry = total // 10
    return f"{THINK}{';'.join(columns)}{END_THINK}{answer}"


def warm_start_examples(
    seed: int, estimate: float = 0.40, careless: float = 0.35
) -> Iterator[tuple[str, str]]:
    """Endless (question, response) pairs over the warm start's operands.

    ``estimate``, ``careless``: shares of these two habits; the rest is careful columns.
    """
    numbers = split_operands().warm_start
    rng = random.Random(f"easyrl demo warm start {seed}")
    while True:
        problem = Problem(rng.choice(numbers), rng.choice(numbers))
        draw = rng.random()
        if draw < estimate:
            response = estimate_response(problem)
        else:
            response = columns_response(problem, carries=draw >= estimate + careless)
        yield problem.prompt, response


def write_splits(
    directory: Path, seed: int, num_train: int = 20_000, num_heldout: int = 1000
) -> tuple[Path, Path]:
    """Writes ``train.jsonl`` and ``heldout.jsonl`` (fields ``prompt``, ``answer``).

    Returns their paths in this order. Raises ``ValueError`` as ``draw_problems`` does.
    """
    operands = split_operands()
    directory.mkdir(parents=True, exist_ok=True)

    def write(name: str, numbers: tuple[int, ...], count: int) -> Path:
        path = directory / f"{name}.jsonl"
        problems = draw_problems(numbers, count, random.Random(f"easyrl demo {name} {seed}"))
        records = [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    train = write("train", operands.train, num_train)
    return train, write("heldout", operands.heldout, num_heldout)


def main(output: Annotated[Path, typer.Option(help="folder to write")], seed: int = 0) -> None:
    """Write the demo's train.jsonl and heldout.jsonl."""
    for path in write_splits(output, seed):
        print(path)


if __name__ == "__main__":
    typer.run(main)
