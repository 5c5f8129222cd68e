"""Short pipeline schedules as rows arrive, against one that waits for them.

``python -m benchmarks.schedules [--pp 2 4] [--rows 24] [--repeats 5]``

Rows of a batch become ready one after another. *Flushes*: all that are ready go through
megatron-core's 1F1B schedule together, then those that are ready by then. *Single*: one 1F1B order
for the whole batch, which each row enters as it comes (``OpenSchedule``). Both on CPU processes
over gloo, a small random model whose stages take the time of a large one's: each sleeps, forward
and backward, since these cores could not stand for as many devices. Arrivals are scripted
(``arrivals.py``): all rows at once, evenly over one and two times a stage's work, and as log-normal
lengths end. Medians; the two take turns; their gradients are compared.

*bubble* is the share of the flushes' time that no schedule needs (``bound_s``). The last line
printed is one JSON object. Exit status 3 if the gradients are apart by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.parts.layouts.cases import write_models
from benchmarks.parts.rank_launch import run_on_ranks
from benchmarks.parts.worktree import ROOT

APART = 1e-5  # relative, of a parameter's gradient: rounding of sums in another order
WORKER = ROOT / "benchmarks/parts/schedules/worker.py"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.schedules", description=__doc__)
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    parser.add_argument("--rows", type=int, default=24, help="micro-batches of a batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/schedules"), help="folder")
    arguments = parser.parse_args()
    folder: Path = arguments.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_models(folder)
    rows = []
    for size in arguments.pp:
        file, log = folder / f"rows-{size}.jsonl", folder / f"{size}-processes.log"
        file.unlink(missing_ok=True)
        given = [str(folder), str(arguments.repeats), str(arguments.rows)]
        if not run_on_ranks(WORKER, given, size, log):
            print(f"schedules: pp{size}: failed, see {log}", file=sys.stderr)
            return 1
        for line in file.read_text().splitlines():
            row = json.loads(line)
            rows.append(row)
            print(
                f"pp{row['pp']}  {row['arrivals']:10} flushes {row['flushes_s']:.2f} s "
                f"({row['num_flushes']} of them, bubble {row['bubble']:.2f})  single "
                f"{row['single_s']:.2f} s (bubble {row['bubble_single']:.2f})  bound "
                f"{row['bound_s']:.2f} s  gradients apart {row['gradients_apart']:.0e}"
            )
    print(json.dumps({"rows": rows}))
    return 3 if any(row["gradients_apart"] > APART for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
