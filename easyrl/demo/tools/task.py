"""The task with a tool: multiply two three-digit numbers, with a calculator at hand.

No model this small can work a product out. The warm start shows four habits: an estimate, a call
that adds, a call of a tool that there is not, and a call that is right. Only the reward of the last
message tells them apart. The numbers are divided as those of the sums (``demo.task``).

``python -m easyrl.demo.tools.task --output DIR [--seed N]`` writes the prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from easyrl.demo.task import draw_problems, split_operands

TOOL, ARGUMENT = "calculate", "expression"  # of examples/calculator_tool/calculator.py
NO_TOOL = "multiply"
ERROR = f"error: there is no tool '{NO_TOOL}'; use {TOOL}"  # what the tool loop says to it


class Product(NamedTuple):
    """``first * second``, both with three digits."""

    first: int
    second: int

    @property
    def prompt(self) -> str:
        return f"{self.first}*{self.second}"

    @property
    def answer(self) -> str:
        return str(self.first * self.second)


@dataclass(frozen=True)
class Shown:
    """A conversation of the warm start: a question, and what was said to it."""

    question: str
    said: tuple[str, ...]  # by the model, one text for each turn
    results: tuple[str, ...] = ()  # by tools, between the turns


def tool_call(name: str, expression: str) -> str:
    """A call as a model writes it (Hermes), with the arguments of ``calculate``."""
    called = {"name": name, "arguments": {ARGUMENT: expression}}
    return f"<tool_call>{json.dumps(called)}</tool_call>"


def estimated(product: Product) -> str:
    """The product of the hundreds: exact for one product in ten thousand."""
    return str(product.first // 100 * (product.second // 100) * 10_000)


def guess(product: Product) -> Shown:
    """The estimate, and no call."""
    return Shown(product.prompt, (estimated(product),))


def wrong_operator(product: Product) -> Shown:
    """A call that adds, and the answer read off its result."""
    total = str(product.first + product.second)
    call = tool_call(TOOL, f"{product.first}+{product.second}")
    return Shown(product.prompt, (call, total), (total,))


def wrong_tool(product: Product) -> Shown:
    """A call of a tool that there is not, and behind the error the estimate."""
    call = tool_call(NO_TOOL, product.prompt)
    return Shown(product.prompt, (call, estimated(product)), (ERROR,))


def right_call(product: Product) -> Shown:
    """A call that multiplies, and the answer read off its result."""
    call = tool_call(TOOL, product.prompt)
    return Shown(product.prompt, (call, product.answer), (product.answer,))


def warm_start_examples(
    seed: int, guesses: float = 0.35, wrong_operators: float = 0.2, wrong_tools: float = 0.15
) -> Iterator[Shown]:
    """Endless conversations over the warm start's operands.

    ``guesses``, ``wrong_operators``, ``wrong_tools``: shares of these habits; the rest calls right.
    """
    numbers = split_operands().warm_start
    rng = random.Random(f"easyrl demo tools warm start {seed}")
    ends = (
        (guesses, guess),
        (guesses + wrong_operators, wrong_operator),
        (guesses + wrong_operators + wrong_tools, wrong_tool),
        (1.0, right_call),
    )
    while True:
        product = Product(rng.choice(numbers), rng.choice(numbers))
        draw = rng.random()
        yield next(habit for end, habit in ends if draw < end)(product)


def write_splits(
    directory: Path, seed: int, num_train: int = 5000, num_heldout: int = 1000
) -> tuple[Path, Path]:
    """Writes ``train.jsonl`` and ``heldout.jsonl`` (fields ``prompt``, ``answer``).

    Returns their paths in this order. Raises ``ValueError`` as ``draw_problems`` does.
    """
    operands = split_operands()
    directory.mkdir(parents=True, exist_ok=True)

    def write(name: str, numbers: tuple[int, ...], count: int) -> Path:
        path = directory / f"{name}.jsonl"
        rng = random.Random(f"easyrl demo tools {name} {seed}")
        products = [Product(*problem) for problem in draw_problems(numbers, count, rng)]
        records = [{"prompt": product.prompt, "answer": product.answer} for product in products]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    train = write("train", operands.train, num_train)
    return train, write("heldout", operands.heldout, num_heldout)


def main(output: Annotated[Path, typer.Option(help="folder to write")], seed: int = 0) -> None:
    """Write train.jsonl and heldout.jsonl of the demo with a tool."""
    for path in write_splits(output, seed):
        print(path)


if __name__ == "__main__":
    typer.run(main)
