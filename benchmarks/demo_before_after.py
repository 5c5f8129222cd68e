"""Seconds of ``make demo`` before and after, in turn.

``python -m benchmarks.demo_before_after [--base REV] [--pairs 3] [--steps 60]``

The demo of this checkout and of an earlier revision's, each by its own code with its own defaults,
as ``make demo`` starts it, but for the warm start: the model that both begin with is made once (a
minute; or given with ``--demo-model``). Seconds are those of the demo's own last line: accuracy
before, training with its evaluations, accuracy after. Medians over the pairs, whose order changes.
The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.parts.end_to_end.ours import THREADS, run_command
from benchmarks.parts.worktree import BASE, ROOT, NoCheckout, imported_first, worktree
from easyrl.demo.build_model import build_model

BEFORE, AFTER = "before", "after"
DEMO_OF_MODEL = (
    "import runpy, shutil; from easyrl.demo import build_model;"
    " build_model.build_model = lambda folder, **_: shutil.copytree({model!r}, folder);"
    " runpy.run_module('easyrl.demo', run_name='__main__')"
)
Said = Mapping[str, float]  # the demo's last line


def main() -> int:
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: worktree and demo end too
    said: dict[str, list[Said]] = {BEFORE: [], AFTER: []}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="demo-before-")))
        try:
            base = opened.enter_context(worktree(arguments.base, folder / "checkout"))
        except NoCheckout as error:
            print(f"demo_before_after: {error}", file=sys.stderr)
            return 1
        model = arguments.demo_model
        if model is None:
            model = folder / "model"
            build_model(model, seed=0)
        sides = {BEFORE: base, AFTER: ROOT}
        for pair in range(arguments.pairs):
            for name in sides if pair % 2 == 0 else reversed(sides):
                run_dir = folder / f"{name}-{pair}"
                try:
                    found = run_demo(sides[name], model.resolve(), run_dir, arguments.steps)
                except RuntimeError as error:
                    print(f"demo_before_after: {name}: {error}", file=sys.stderr)
                    return 1
                said[name].append(found)
                print(
                    f"{name}: {found['seconds']:.1f} s, accuracy {found['accuracy_before']:.3f} -> "
                    f"{found['accuracy_after']:.3f}",
                    flush=True,
                )
    print(json.dumps({"base": arguments.base, **compared(said)}))
    return 0


def run_demo(checkout: Path, model: Path, run_dir: Path, num_steps: int) -> Said:
    """The last line of a demo. Raises ``RuntimeError`` if it fails."""
    environment = imported_first(checkout)
    for name in THREADS:  # given, they would end the sharing of cores
        environment.pop(name, None)
    command = [sys.executable, "-c", DEMO_OF_MODEL.format(model=str(model))]
    command += ["--run-dir", str(run_dir), f"trainer.max_steps={num_steps}"]
    log = run_dir.with_suffix(".log")
    run_command(command, log, environment, checkout)
    said: Said = json.loads(log.read_text().splitlines()[-1])
    return said


def compared(said: Mapping[str, Sequence[Said]]) -> dict[str, float | list[float]]:
    """Medians of both sides, and the share of before that it takes now, pair by pair."""
    shares = [
        after["seconds"] / before["seconds"]
        for before, after in zip(said[BEFORE], said[AFTER], strict=True)
    ]

    def median(name: str, key: str) -> float:
        return round(statistics.median(each[key] for each in said[name]), 4)

    seconds = {f"{name}_s": median(name, "seconds") for name in (BEFORE, AFTER)}
    accuracies = {f"{name}_accuracy": median(name, "accuracy_after") for name in (BEFORE, AFTER)}
    return {
        "steps": said[AFTER][0]["steps"],
        **seconds,
        "of_before": round(statistics.median(shares), 3),
        "pairs": [round(share, 3) for share in shares],
        **accuracies,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", default=BASE, metavar="REV", help=f"default: {BASE}")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of the training; the demo has 60")
    parser.add_argument("--demo-model", type=Path, metavar="DIR", help="made by the demo before")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
