"""What it saves to replace rejected groups while the batch is generated, and not after it.

``python -m benchmarks.dynamic_sampling [--batches 3] [--rejections 0.1 0.2 0.3 0.4] [--ranks 1 2]``

Two sides draw the same batch of B accepted groups from the same prompt order, with the real
producer. *Overlapped*: each rejected group is replaced at once, position p is drawn when
p < B + R. *After*: B groups are drawn and waited for, then as many as were rejected, and so on.
Both train what is accepted as it comes.

Generation and training sleep instead of computing: 64 requests at a time for all ranks together,
response lengths log-normal with sigma 0.8 and the same for the same prompt and sample on both
sides; training is as long as the generation of a batch in which nothing is rejected. What is
rejected is a function of the prompt. Two ranks are two producers and two trainers in threads of one
process; they share decisions through a ``TCPStore`` as ranks of a run do.

``saving`` is 1 - overlapped / after, of the time of whole batches. ``simulated_saving`` is that of
a discrete-event simulation of the same lengths, without any overhead. WeChat-YATT's Table 1 has 16
to 24 % for 10 to 40 % rejected, of rollout time alone: there both sides sample the rejected again,
and what saves is a reward model that stays on devices of its own. The last line printed is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.parts.dynamic_sampling.load import Load, same_batch
from benchmarks.parts.dynamic_sampling.run import run_batch
from benchmarks.parts.dynamic_sampling.simulation import simulate

NUM_SLOTS = 64


@dataclass
class Side:
    """Seconds of one side's batches, all together."""

    batch_s: float = 0.0
    generation_s: float = 0.0
    simulated_s: float = 0.0


def main() -> None:
    arguments = _parse()
    load = Load(arguments.groups, arguments.samples, NUM_SLOTS, 0.0, mean_s=arguments.mean_s)
    print(
        f"{arguments.batches} batches of {load.num_groups} groups x {load.num_samples} responses "
        f"of {load.mean_s:g} s on average, {NUM_SLOTS} at a time; two ranks: threads of one process"
    )
    print("rejected  ranks  overlapped s  after s   saving  simulated  of generation  same batch")
    rows = []
    for num_ranks in arguments.ranks:
        for rejection in arguments.rejections:
            of_row = replace(load, rejection=rejection, num_ranks=num_ranks)
            rows.append(_row([replace(of_row, seed=seed) for seed in range(arguments.batches)]))
    print(json.dumps({"rows": rows}))


def _row(loads: Sequence[Load]) -> dict[str, object]:
    """Both sides of the same batches, in turn."""
    overlapped, after = Side(), Side()
    same = True
    for load in loads:
        trained = [_measure(load, side, side is overlapped) for side in (overlapped, after)]
        same = same and same_batch(*trained)
    row = {
        "rejection": loads[0].rejection,
        "ranks": loads[0].num_ranks,
        "overlapped_s": round(overlapped.batch_s, 2),
        "after_s": round(after.batch_s, 2),
        "saving": round(1 - overlapped.batch_s / after.batch_s, 3),
        "simulated_saving": round(1 - overlapped.simulated_s / after.simulated_s, 3),
        "same_batch": same,
    }
    of_generation = 1 - overlapped.generation_s / after.generation_s
    print(
        f"{row['rejection']:8.0%}  {row['ranks']:5}  {row['overlapped_s']:12.2f}  "
        f"{row['after_s']:7.2f}  {row['saving']:7.1%}  {row['simulated_saving']:9.1%}  "
        f"{of_generation:13.1%}  {'yes' if same else 'NO':>10}",
        flush=True,
    )
    return row


def _measure(load: Load, side: Side, overlapped: bool) -> list[int]:
    """Adds a batch to ``side``; the positions that it has trained."""
    train_s = train_s_of_group(load)
    run = run_batch(load, train_s, overlapped=overlapped)
    side.batch_s += run.batch_s
    side.generation_s += run.generation_s
    side.simulated_s += simulate(load, overlapped=overlapped).batch_s(train_s)
    return run.trained


def train_s_of_group(load: Load) -> float:
    """Such that training a rank's share is as long as generation where nothing is rejected."""
    generation_s = simulate(replace(load, rejection=0.0), overlapped=True).generation_s
    return load.num_ranks * generation_s / load.num_groups


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--groups", type=int, default=64, help="accepted ones of a batch")
    parser.add_argument("--samples", type=int, default=8, help="per group")
    parser.add_argument("--mean-s", type=float, default=0.2, help="of a response")
    parser.add_argument("--rejections", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.4])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    return parser.parse_args()


if __name__ == "__main__":
    main()
