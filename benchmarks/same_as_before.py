"""Whether the present tree trains the same weights, to the bit, as earlier commits.

All train a small random model with the same settings, each from its own checkout by its own
command lines, on one machine in strict mode, and the tensors of their checkpoints, weights and
Adam's moments, are compared after each batch. By default with two commits: the last one whose
folders had format 1, and the one before the work on speed from end to end.

    python -m benchmarks.same_as_before
    python -m benchmarks.same_as_before --settings ranks=1 zero=0 --base HEAD

The last line is a JSON object with a row per commit and setting. The status says whether the
comparison was made, not what came of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.parts.random_model import write_prompts, write_random_model
from benchmarks.parts.same_as_before.settings import (
    BATCH,
    NUM_BATCHES,
    PROMPT_TOKENS,
    QUICK,
    SETTINGS,
    Inputs,
    Setting,
    form_of,
    present_form,
    select,
)
from benchmarks.parts.same_as_before.side import Failed, Side
from benchmarks.parts.same_as_before.tensors import State, compare
from benchmarks.parts.worktree import BASE, ROOT, NoCheckout, worktree

BASES = ("e7cfbd6", BASE)
REWARDS = Path(__file__).resolve().with_name("parts") / "same_as_before" / "reward.py"


def write_inputs(folder: Path) -> Inputs:
    """The same for both; the server is each one's own."""
    count = BATCH * NUM_BATCHES
    return Inputs(
        model=write_random_model(folder / "model", hidden_size=32, num_layers=2),
        prompts=write_prompts(folder / "prompts.jsonl", count, PROMPT_TOKENS),
        rewards=Path(shutil.copy(REWARDS, folder)),  # its folder comes onto the path of modules
        url="",
    )


def train_all(
    side: Side, settings: Sequence[Setting], inputs: Inputs
) -> dict[Setting, list[State]]:
    """The states after each batch, by setting; one server for all."""
    side.folder.mkdir()
    side.check()
    trained = {}
    with side.server(inputs.model) as url:
        for setting in settings:
            start = time.monotonic()
            trained[setting] = side.train(setting, replace(inputs, url=url))
            tell(f"{side.name:7} {setting}: {time.monotonic() - start:.1f} s")
    return trained


def compare_all(
    name: str, base: dict[Setting, list[State]], present: dict[Setting, list[State]]
) -> list[dict[str, Any]]:
    """A row per setting; ``name`` of the base."""
    rows = []
    for setting in base:
        try:
            difference = compare(base[setting], present[setting])
        except ValueError as error:
            raise Failed(f"{name}, {setting}: {error}") from error
        words = ["equal" if equal else "differs" for equal in difference.equal_batches]
        tell(f"{name}, {setting}: batches " + ", ".join(f"{n} {w}" for n, w in enumerate(words, 1)))
        rows.append(
            {
                "base": name,
                "setting": str(setting),
                "equal": difference.equal,
                "max_rel_diff": difference.max_rel_diff,
            }
        )
    return rows


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(
    settings: Sequence[Setting], revisions: Sequence[str], base_dir: Path | None
) -> list[dict[str, Any]]:
    """All sides, one after the other; raises ``Failed``, ``NoCheckout``.

    ``base_dir``: a checkout of the one revision.
    """
    with tempfile.TemporaryDirectory(prefix="same-as-before-") as name:
        folder = Path(name).resolve()
        inputs = write_inputs(folder)
        bases = {}
        for revision in revisions:
            with ExitStack() as opened:
                checkout = base_dir or opened.enter_context(worktree(revision, folder / "checkout"))
                before = Side(revision, checkout, form_of(checkout), folder / f"base-{len(bases)}")
                bases[revision] = train_all(before, settings, inputs)
        now = Side("present", ROOT, present_form, folder / "present")
        present = train_all(now, settings, inputs)
        return [
            row for name, trained in bases.items() for row in compare_all(name, trained, present)
        ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Whether weights are trained as before.")
    parser.add_argument(
        "--base", nargs="+", default=BASES, metavar="REV", help=f"default: {' '.join(BASES)}"
    )
    parser.add_argument("--base-dir", type=Path, metavar="DIR", help="a checkout of the base")
    parser.add_argument(
        "--settings", nargs="+", metavar="PART", help="only those with all parts, as ranks=2 zero=0"
    )
    parser.add_argument("--quick", action="store_true", help="the first and the last setting only")
    arguments = parser.parse_args(argv)
    if arguments.base_dir:
        arguments.base = [str(arguments.base_dir)]
    settings = QUICK if arguments.quick else SETTINGS
    if arguments.settings:
        settings = [setting for setting in settings if setting in select(arguments.settings)]
    if not settings:
        parser.error(f"no such setting; there are {', '.join(map(str, SETTINGS))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers and worktree go first
    base_dir = arguments.base_dir.resolve() if arguments.base_dir else None
    try:
        rows = run(settings, arguments.base, base_dir)
    except (Failed, NoCheckout) as error:
        tell(f"same_as_before: {error}")
        return 1
    print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
