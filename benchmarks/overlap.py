"""How much of the ideal overlap periodic asynchrony reaches: one run, sync and async, in one go.

``python -m benchmarks.overlap [--repeats 3] [--batches 3]``

One rank: real generation by an embedded server on one core and real training by the trainer on
another. Two ranks: ZeRO-2 through the ``deepspeed`` launcher, each rank with its producer, on both
cores; generation by an endpoint that sleeps instead of computing. Both are balanced first: sync
runs are measured and the speed of generation set until training takes 0.7 to 0.8 of its time, with
one rank by the sequences that are in flight at a time, with two by the seconds per token.

The bound is what no schedule can beat within one batch: the longer of generation and training, plus
weight sync and optimizer step, summed over batches from the sync run's own spans. ``unexplained``:
the largest share of a rank's or an endpoint's time that the run's own accounts (docs/timeline.md)
leave without a cause. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.parts.overlap.balance import balance
from benchmarks.parts.overlap.endpoint import SleepingEndpoint
from benchmarks.parts.overlap.runs import Mode, OneRank, Setup, TwoRanks, Workload
from benchmarks.parts.overlap.spans import Batch, overlap, training_over_generation
from easyrl.demo.build_model import build_tokenizer
from easyrl.timeline.accounting import most_unexplained
from easyrl.timeline.accounts_file import read_accounts

MAX_INFLIGHT = 25  # of one rank, to begin with
SECONDS_PER_TOKEN = 1.6e-3  # of two
OF_TWO = ("async_over_sync", "efficiency", "sync_unexplained", "async_unexplained")
MODES: tuple[Mode, ...] = ("sync", "async")


def main() -> None:
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: server and trainer end too
    work = Workload(hidden_size=arguments.hidden_size, num_layers=arguments.num_layers)
    both = replace(work, batch_size=2 * work.batch_size)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="easyrl-overlap-")))
        both.write(folder, arguments.batches + 1)
        tokenizer = build_tokenizer()
        endpoint = opened.enter_context(SleepingEndpoint(len(tokenizer), tokenizer.eos_token_id))
        _describe("one rank", work)
        one = _measure(OneRank(folder, work), MAX_INFLIGHT, arguments)
        _describe("two ranks", both)
        two = _measure(TwoRanks(folder, both, endpoint), SECONDS_PER_TOKEN, arguments)
    print(json.dumps(one | {"two_ranks": {key: two[key] for key in OF_TWO}}))


def _describe(name: str, work: Workload) -> None:
    print(
        f"{name}: {work.batch_size} prompts x {work.num_generations} responses of "
        f"{work.min_tokens} to {work.max_tokens} tokens",
        flush=True,
    )


def _measure(setup: Setup, speed: float, arguments: argparse.Namespace) -> dict[str, float]:
    """Balances it, then compares both modes: medians over the repeats."""
    unexplained: dict[Mode, list[float]] = {mode: [] for mode in MODES}

    def run(mode: Mode, speed: float, num_batches: int) -> list[Batch]:
        """The first batch, which warms everything up, is not counted."""
        with tempfile.TemporaryDirectory(prefix="easyrl-overlap-") as run_dir:
            batches = setup.run(mode, Path(run_dir), speed, num_batches + 1)[1:]
            accounts = read_accounts(Path(run_dir))[1:]
        unexplained[mode].append(most_unexplained(each for one in accounts for each in one.lanes))
        return batches

    def ratio(speed: float) -> float:
        found = training_over_generation(run("sync", speed, 1))
        print(f"  {setup.describe(speed)}: training takes {found:.2f} of generation", flush=True)
        return found

    chosen = balance(speed, ratio, setup.slower)
    print(f"  chosen: {setup.describe(chosen)}", flush=True)
    rows = []
    for _ in range(arguments.repeats):
        rows.append(overlap(*(run(mode, chosen, arguments.batches) for mode in MODES)))
        print("  " + "  ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()))
    medians = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
    print(
        f"  async over sync {medians['async_over_sync']:.2f} of at most {medians['bound']:.2f}: "
        f"efficiency {medians['efficiency']:.2f}",
        flush=True,
    )
    for mode in MODES:
        medians[f"{mode}_unexplained"] = round(max(unexplained[mode]), 4)
        print(f"  {mode}: unexplained {max(unexplained[mode]):.2%} of a lane at most", flush=True)
    return medians


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=Workload.hidden_size)
    parser.add_argument("--num-layers", type=int, default=Workload.num_layers)
    return parser.parse_args()


if __name__ == "__main__":
    main()
