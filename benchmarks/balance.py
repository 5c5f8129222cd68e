"""Finished groups to the rank with least to train, against fixed shares of the prompts.

``python -m benchmarks.balance [--groups 256] [--batches 3] [--seconds 30] [--ratio 1.5] [--quick]``

Two data-parallel ranks with the producers, journals and store of a run; endpoints and trainers
sleep. Responses have log-normal lengths and all begin at once; a row takes as long as its groups
cost (``RowCost`` of a 4B model), ``--seconds`` for half a batch, ``--ratio`` times as long as the
longest response. Trainers take up to eight rows of 8192 tokens at once, as those of a run do.

*Idle* is the share of the ranks' time in which one waits while a finished group is not begun, or
while the other trains its last rows. *strides*: rank p mod 2 trains position p. *claims*: a rank
with room draws the next position and trains it. *handover*: it draws it, and when the group is
finished the rank with least to train gets it (``trainer.balance``). *hindsight*: all lengths are
known, the longest finished group goes to the rank that is free, at no cost: it bounds from above
what the best assignment has. Means over the batches, with seeds from 0.

*bytes_moved* is what a batch's handed-over groups took on their way. *bytes_dock* is one fetch of
the batch's samples from MindSpeed-RL's transfer dock, by the quantities of its equation (1):
G N B (PL + n SL + M), with G prompts, N responses each, B = 4 bytes, PL and SL the longest prompt
and response, n = 3 items as long as a response (tokens, log-probabilities, mask) and M = 2 scalars;
there everything is padded and moves.

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from benchmarks.parts.balance.hindsight import longest_first
from benchmarks.parts.balance.idle import idle_share
from benchmarks.parts.balance.ranks import NUM_RANKS, Assignment, train_batch
from benchmarks.parts.balance.workload import LONGEST_PROMPT, LONGEST_RESPONSE, make_load

NUM_GENERATIONS = 8
DOCK_ITEMS, DOCK_SCALARS, DOCK_BYTES = 3, 2, 4


def main() -> int:
    arguments = _parse()
    idle: dict[str, list[float]] = {name: [] for name in (*get_args(Assignment), "hindsight")}
    moved: list[int] = []
    bytes_moved: list[int] = []
    for seed in range(arguments.batches):
        load = make_load(
            arguments.groups, NUM_GENERATIONS, arguments.seconds, arguments.ratio, seed
        )
        for assignment in get_args(Assignment):
            with TemporaryDirectory() as folder:
                outcome = train_batch(load, assignment, Path(folder))
            idle[assignment].append(idle_share(outcome.ranks, load.arrivals_s))
        moved.append(outcome.groups_moved)
        bytes_moved.append(outcome.bytes_moved)
        idle["hindsight"].append(idle_share(longest_first(load, NUM_RANKS), load.arrivals_s))
        shown = "  ".join(f"{name} {shares[-1]:.4f}" for name, shares in idle.items())
        print(
            f"batch {seed}: idle  {shown}   {moved[-1]} of {arguments.groups} groups moved, "
            f"{bytes_moved[-1] / 1e6:.2f} MB",
            flush=True,
        )
    items = LONGEST_PROMPT + DOCK_ITEMS * LONGEST_RESPONSE + DOCK_SCALARS
    row: dict[str, float] = {
        f"idle_{name}": round(statistics.mean(shares), 4) for name, shares in idle.items()
    }
    row |= {
        "bytes_moved": round(statistics.mean(bytes_moved)),
        "bytes_dock": arguments.groups * NUM_GENERATIONS * DOCK_BYTES * items,
        "groups_moved": round(statistics.mean(moved), 1),
        "groups": arguments.groups,
        "batches": arguments.batches,
    }
    print(json.dumps(row))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.balance", description=__doc__)
    parser.add_argument("--groups", type=int, default=256, help="prompts of a batch")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of training, each rank")
    parser.add_argument("--ratio", type=float, default=1.5, help="of training to generation")
    parser.add_argument("--quick", action="store_true", help="one short batch: it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.batches, arguments.seconds = 1, 6.0
    return arguments


if __name__ == "__main__":
    sys.exit(main())
