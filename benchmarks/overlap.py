"""How much of the ideal overlap periodic asynchrony reaches: one run, sync and async, in one go.

``python -m benchmarks.overlap [--repeats 3] [--batches 3] [--base]``

One rank: real generation by an embedded server on one core and real training by the trainer on
another. Two ranks: ZeRO-2 through the ``deepspeed`` launcher, each rank with its producer, on both
cores; generation by an endpoint that sleeps instead of computing. Both are balanced first: sync
runs are measured and the speed of generation set until training takes 0.7 to 0.8 of its time, with
one rank by the sequences that are in flight at a time, with two by the seconds per token.

The bound is what no schedule can beat within one batch: the longer of generation and training, plus
weight sync and optimizer step, summed over batches from the sync run's own spans. ``unexplained``:
the largest share of a rank's or an endpoint's time that the run's own accounts (docs/timeline.md)
leave without a cause. With ``--base`` an earlier revision, server and trainer, runs the same work
at the same speed of generation in turn with this one. The last line printed is one JSON object.
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
from dataclasses import replace
from pathlib import Path

from benchmarks.parts.overlap.balance import balance
from benchmarks.parts.overlap.endpoint import SleepingEndpoint
from benchmarks.parts.overlap.runs import Mode, OneRank, Setup, TwoRanks, Workload
from benchmarks.parts.overlap.spans import Batch, overlap, training_over_generation
from benchmarks.parts.worktree import BASE, NoCheckout, worktree
from easyrl.demo.build_model import build_tokenizer
from easyrl.timeline.accounting import most_unexplained
from easyrl.timeline.accounts_file import read_accounts

MAX_INFLIGHT = 25  # of one rank, to begin with
SECONDS_PER_TOKEN = 1.6e-3  # of two
OF_TWO = ("async_over_sync", "efficiency", "sync_unexplained", "async_unexplained")
MODES: tuple[Mode, ...] = ("sync", "async")
NOW, BEFORE = "now", "before"
OF_BEFORE = ("sync_s", "async_s", "async_over_sync", "efficiency")  # that is told of it


def main() -> int:
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: server and trainer end too
    work = Workload(hidden_size=arguments.hidden_size, num_layers=arguments.num_layers)
    both = replace(work, batch_size=2 * work.batch_size)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="easyrl-overlap-")))
        checkout = None
        if arguments.base is not None:
            try:
                checkout = opened.enter_context(worktree(arguments.base, folder / "checkout"))
            except NoCheckout as error:
                print(f"overlap: --base: {error}", file=sys.stderr)
                return 1
        both.write(folder, arguments.batches + 1)
        tokenizer = build_tokenizer()
        endpoint = opened.enter_context(SleepingEndpoint(len(tokenizer), tokenizer.eos_token_id))
        _describe("one rank", work)
        one_rank = OneRank(folder, work)
        before = replace(one_rank, checkout=checkout) if checkout else None
        one = _measure(one_rank, before, MAX_INFLIGHT, arguments)
        _describe("two ranks", both)
        two_ranks = TwoRanks(folder, both, endpoint)
        before_two = replace(two_ranks, checkout=checkout) if checkout else None
        two = _measure(two_ranks, before_two, SECONDS_PER_TOKEN, arguments)
    of_two = {key: two[key] for key in (*OF_TWO, *of_before_keys(two))}
    print(json.dumps(one | {"two_ranks": of_two}))
    return 0


def _describe(name: str, work: Workload) -> None:
    print(
        f"{name}: {work.batch_size} prompts x {work.num_generations} responses of "
        f"{work.min_tokens} to {work.max_tokens} tokens",
        flush=True,
    )


def _measure(
    setup: Setup, before: Setup | None, speed: float, arguments: argparse.Namespace
) -> dict[str, float]:
    """Balances it, then compares both modes: medians over the repeats.

    ``before``, an earlier revision's, takes turns with it at the speed that was chosen.
    """
    unexplained: dict[Mode, list[float]] = {mode: [] for mode in MODES}

    def run(setup: Setup, mode: Mode, speed: float, num_batches: int) -> list[Batch]:
        """The first batch, which warms everything up, is not counted."""
        with tempfile.TemporaryDirectory(prefix="easyrl-overlap-") as run_dir:
            batches = setup.run(mode, Path(run_dir), speed, num_batches + 1)[1:]
            accounts = read_accounts(Path(run_dir))[1:] if setup is not before else []
        if accounts:  # earlier revisions may keep none
            lanes = (each for one in accounts for each in one.lanes)
            unexplained[mode].append(most_unexplained(lanes))
        return batches

    def ratio(speed: float) -> float:
        found = training_over_generation(run(setup, "sync", speed, 1))
        print(f"  {setup.describe(speed)}: training takes {found:.2f} of generation", flush=True)
        return found

    chosen = balance(speed, ratio, setup.slower)
    print(f"  chosen: {setup.describe(chosen)}", flush=True)
    sides = {NOW: setup} | ({BEFORE: before} if before is not None else {})
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for repeat in range(arguments.repeats):
        for name in sides if repeat % 2 == 0 else reversed(sides):
            batches = (run(sides[name], mode, chosen, arguments.batches) for mode in MODES)
            row = overlap(*batches)
            rows[name].append(row)
            print(f"  {name}: " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    result = compared(rows)
    print(
        f"  async over sync {result['async_over_sync']:.2f} of at most {result['bound']:.2f}: "
        f"efficiency {result['efficiency']:.2f}",
        flush=True,
    )
    if before is not None:
        print("  " + "  ".join(f"{key} {result[key]:.3f}" for key in of_before_keys(result)))
    for mode in MODES:
        result[f"{mode}_unexplained"] = round(max(unexplained[mode]), 4)
        print(f"  {mode}: unexplained {max(unexplained[mode]):.2%} of a lane at most", flush=True)
    return result


def compared(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Medians over the repeats; of an earlier revision's what it took, and the share of that."""

    def medians(name: str) -> dict[str, float]:
        return {
            key: round(statistics.median(row[key] for row in rows[name]), 3)
            for key in rows[name][0]
        }

    now = medians(NOW)
    if BEFORE not in rows:
        return now
    before = medians(BEFORE)
    told = {f"before_{key}": before[key] for key in OF_BEFORE}
    shares = {f"{mode}_of_before": now[f"{mode}_s"] / before[f"{mode}_s"] for mode in MODES}
    return now | told | {key: round(share, 3) for key, share in shares.items()}


def of_before_keys(result: Mapping[str, float]) -> list[str]:
    """Keys of ``compared`` that an earlier revision has to do with."""
    return [key for key in result if key.startswith("before_") or key.endswith("_of_before")]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument(
        "--base",
        nargs="?",
        const=BASE,
        metavar="REV",
        help=f"an earlier revision in turn with this one; without REV {BASE}",
    )
    parser.add_argument("--hidden-size", type=int, default=Workload.hidden_size)
    parser.add_argument("--num-layers", type=int, default=Workload.num_layers)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
