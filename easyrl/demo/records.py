"""Supervised records of the demo's task: sums worked out by columns, and pairs of such.

``python -m easyrl.demo.records --output DIR [--seed N]`` writes them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from easyrl.demo.task import Problem, columns_response, draw_problems, split_operands


def worked_sum(problem: Problem) -> dict[str, str]:
    """A record with the careful answer."""
    return {"prompt": problem.prompt, "completion": columns_response(problem, carries=True)}


def preference(problem: Problem) -> dict[str, str]:
    """A pair of which the careful answer is preferred to the one that forgets the carries."""
    return {
        "prompt": problem.prompt,
        "chosen": columns_response(problem, carries=True),
        "rejected": columns_response(problem, carries=False),
    }


def write_records(
    directory: Path, seed: int, num_train: int = 4000, num_heldout: int = 400
) -> list[Path]:
    """Writes ``sft.jsonl`` (prompt, completion) and ``dpo.jsonl`` (prompt, chosen, rejected), and
    held-out ones beside them, whose operands no record has that is trained.

    Returns the paths. Raises ``ValueError`` as ``draw_problems`` does.
    """
    operands = split_operands()
    directory.mkdir(parents=True, exist_ok=True)
    kinds: tuple[tuple[str, Callable[[Problem], dict[str, str]]], ...] = (
        ("sft", worked_sum),
        ("dpo", preference),
    )
    splits = (("", operands.train, num_train), ("-heldout", operands.heldout, num_heldout))
    paths = []
    for kind, record_of in kinds:
        for suffix, numbers, count in splits:
            path = directory / f"{kind}{suffix}.jsonl"
            rng = random.Random(f"easyrl demo records {suffix} {seed}")
            records = [record_of(p) for p in _with_a_carry(draw_problems(numbers, count, rng))]
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
            paths.append(path)
    return paths


def _with_a_carry(problems: Sequence[Problem]) -> list[Problem]:
    """Those that the careless answer gets wrong: the others have no pair."""
    return [p for p in problems if columns_response(p, True) != columns_response(p, False)]


def main(output: Annotated[Path, typer.Option(help="folder to write")], seed: int = 0) -> None:
    """Write the demo's records for supervised fine-tuning and DPO."""
    for path in write_records(output, seed):
        print(path)


if __name__ == "__main__":
    typer.run(main)
