"""The border between two batches: what happens from the last micro-batch to the next request.

``python -m benchmarks.batch_border [--base REV] [--repeats 3] [--quick]``

Both checkouts train the same model with the same settings, in turn: *demo*, the run of ``make
demo`` (its warm-started model is made first, or given with ``--demo-model``), and *large*, a random
model whose fp32 weights take 0.5 GB, with a checkpoint every step. The server has one core, the
trainer another. Each run's functions are timed by a wrapper around them; printed is when each
begins, counted from the end of the last micro-batch, and how long it takes (medians over all
borders of all repeats). The *critical path* is the time until the first request of the next batch
is sent, without the optimizer's own step (clip and Adam). *Responses* is the same until a response
may be handed out: where the canary runs beside the first requests, they wait for it. A function
that neither checkout has any more is an error. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.parts.batch_border.borders import Border, read_borders, rows
from benchmarks.parts.random_model import write_prompts, write_random_model
from benchmarks.parts.same_as_before.settings import present_form
from benchmarks.parts.same_as_before.side import (
    Failed,
    Side,
    free_port,
    tail,
    wait_until_healthy,
)
from benchmarks.parts.worktree import BASE, ROOT, worktree
from easyrl.demo.build_model import build_model
from easyrl.demo.task import write_splits
from easyrl.runtime.machine import pin_process, usable_cpus

TRACED_TRAINER = Path(__file__).resolve().with_name("parts") / "batch_border" / "traced_trainer.py"
LARGE_LAYERS, LARGE_HIDDEN = 9, 1088  # 0.5 GB in fp32
RUN_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Case:
    """A run that is measured."""

    name: str
    model: Path
    max_model_len: int
    config: str
    overrides: tuple[str, ...]
    num_batches: int


def main() -> int:
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers and worktree go first
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="batch-border-")))
        try:
            base = arguments.base_dir or opened.enter_context(
                worktree(arguments.base, folder / "checkout")
            )
            sides = {"before": base.resolve(), "after": ROOT}
            results = {}
            for name in arguments.cases:
                case = CASES[name](folder, arguments)
                results[name] = measure(case, sides, folder, arguments.repeats)
        except Failed as error:
            print(f"batch_border: {error}", file=sys.stderr)
            return 1
    print(json.dumps(results))
    return 0


def demo(folder: Path, arguments: argparse.Namespace) -> Case:
    """The run of ``make demo`` without its evaluations."""
    model = arguments.demo_model
    if model is None:
        model = folder / "demo-model"
        build_model(model, seed=0)
    train, _ = write_splits(folder / "demo-data", seed=0)
    overrides = (f"data.files=[{train}]", "evaluation=null")
    return Case("demo", model, 128, "configs/demo.yaml", overrides, 6 if arguments.quick else 16)


def large(folder: Path, arguments: argparse.Namespace) -> Case:
    """0.5 GB of weights, two groups of two short responses, a checkpoint each step."""
    model = write_random_model(
        folder / "large-model", hidden_size=LARGE_HIDDEN, num_layers=LARGE_LAYERS
    )
    num_batches = 4 if arguments.quick else 6
    prompts = write_prompts(folder / "large.jsonl", 2 * num_batches, 16)
    overrides = (
        f"data.files=[{prompts}]",
        "data.max_prompt_tokens=32",
        *("rollout.num_generations=2", "rollout.max_tokens=4", "trainer.batch_size=2"),
        *("trainer.max_tokens_per_micro_batch=512", "checkpoint.every_steps=1"),
        "checkpoint.keep=1",
    )
    return Case("large", model, 512, "benchmarks/overlap.yaml", overrides, num_batches)


CASES = {"demo": demo, "large": large}


def measure(
    case: Case, sides: dict[str, Path], folder: Path, repeats: int
) -> dict[str, float | dict[str, float]]:
    """Both sides in turn, ``repeats`` times; medians in milliseconds."""
    borders: defaultdict[str, list[Border]] = defaultdict(list)
    missing: dict[str, list[str]] = {}
    for repeat in range(repeats):
        order = list(sides.items())
        for name, checkout in order if repeat % 2 == 0 else reversed(order):
            run_dir = folder / f"{case.name}-{name}-{repeat}"
            run_dir.mkdir()
            found, missing[name] = run_once(case, checkout, run_dir)
            borders[name] += found
            paths = ", ".join(f"{1e3 * border.rest:.0f}" for border in found)
            waits = ", ".join(f"{1e3 * border.to_responses:.0f}" for border in found)
            print(
                f"{case.name}, {name}: critical path {paths} ms, responses {waits} ms", flush=True
            )
        refuse_unknown(missing)
    for name in sides:
        if missing[name]:
            print(f"{case.name}, {name} does not have {', '.join(missing[name])}")
        print(f"\n{case.name}, {name}: begins, takes (ms)")
        for row in rows(borders[name]):
            print(f"  {1e3 * row.start:8.1f} {1e3 * row.seconds:8.1f}  {row.name} [{row.thread}]")
        found_ms = _medians(borders[name])
        print(
            f"  first request after {found_ms.whole:.1f}, of it clip and Adam {found_ms.step:.1f}: "
            f"{found_ms.rest:.1f} ms; responses {found_ms.to_responses:.1f} ms\n"
        )
    before, after = (_medians(borders[name]) for name in ("before", "after"))
    ratio = after.rest / before.rest
    print(
        f"{case.name}: critical path {before.rest:.1f} -> {after.rest:.1f} ms, {ratio:.2f} of it; "
        f"responses {before.to_responses:.1f} -> {after.to_responses:.1f} ms\n"
    )
    return {
        "before_ms": round(before.rest, 2),
        "after_ms": round(after.rest, 2),
        "ratio": round(ratio, 3),
        "responses_ms": {
            "before": round(before.to_responses, 2),
            "after": round(after.to_responses, 2),
        },
        "clip_and_adam_ms": {"before": round(before.step, 2), "after": round(after.step, 2)},
    }


def refuse_unknown(missing: Mapping[str, Sequence[str]]) -> None:
    """Raises ``Failed`` for functions that no side has: the list would not be whole."""
    of_all = set.intersection(*map(set, missing.values()))
    if of_all:
        raise Failed(
            f"neither checkout has {', '.join(sorted(of_all))}: renamed? "
            f"Correct TRACED in {TRACED_TRAINER.name}"
        )


def run_once(case: Case, checkout: Path, run_dir: Path) -> tuple[list[Border], list[str]]:
    """The borders of one run with the code of ``checkout``, and what it has no function for.

    Raises ``Failed``.
    """
    spans, log = run_dir / "spans.jsonl", run_dir / "trainer.log"
    side = Side(run_dir.name, checkout, present_form, run_dir)
    side.check()
    cpus, port = usable_cpus(), free_port()
    options = ["--max-model-len", str(case.max_model_len), "--num-threads", "1"]
    serve = [sys.executable, "-m", "easyrl", "serve", str(case.model), "--port", str(port)]
    train = [sys.executable, str(TRACED_TRAINER), str(spans), str(ROOT / case.config)]
    train += [
        f"run.output_dir={run_dir / 'run'}",
        f"model.path={case.model}",
        f"inference.endpoints=[http://127.0.0.1:{port}]",
        f"trainer.max_steps={case.num_batches}",
        "checkpoint.export_at_end=false",
        *case.overrides,
    ]
    with side.process([*serve, *options], run_dir / "server.log") as server:
        pin_process(server.pid, cpus[-1:])
        wait_until_healthy(server, port, run_dir / "server.log")
        with side.process(train, log) as trainer:
            pin_process(trainer.pid, cpus[:1])
            if status := trainer.wait(RUN_TIMEOUT_S):
                raise Failed(f"{run_dir.name}: exit status {status}\n{tail(log)}")
    return read_borders(spans), json.loads(spans.with_suffix(".missing.json").read_text())


class Medians(NamedTuple):
    """Of borders, in milliseconds."""

    whole: float
    step: float
    rest: float
    to_responses: float


def _medians(borders: list[Border]) -> Medians:
    found = ([getattr(border, name) for border in borders] for name in Medians._fields)
    return Medians(*(1e3 * statistics.median(values) for values in found))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The border between two batches.")
    parser.add_argument("--base", default=BASE, metavar="REV", help=f"default: {BASE}")
    parser.add_argument("--base-dir", type=Path, metavar="DIR", help="a checkout of the base")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer batches")
    parser.add_argument("--demo-model", type=Path, metavar="DIR", help="made by the demo before")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
