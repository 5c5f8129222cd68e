"""Processor time of one response, of each process that has to do with it, decoding left out.

``python -m benchmarks.response_cost [--groups 32] [--samples 8] [--batches 12]``

A producer wired by the same code as a run (pool, fetcher, reward worker, event log; the demo's
reward) draws batches from ``easyrl serve``, whose model is random and small: prompts of 20 tokens,
responses of 15 to 40. Counted per response: the producer's process, which is the trainer's in a
run; the fetcher; the reward worker; the server without its decoding. Twice: with all of a batch in
flight at once, so that it leaves together, and with a quarter of that (``inference.max_inflight``),
where a sample leaves when another has made room. The last line printed is one JSON object.

``--base`` measures an earlier revision, checked out beside, too: ``--pairs`` runs of each in turns,
medians, the ratio base over now. About 40 s a run of both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.parts.random_model import write_random_model
from benchmarks.parts.worktree import BASE, ROOT, worktree

PARTS = Path("benchmarks/parts/response_cost")
EXPECTED_MS = 0.4  # with all in flight at once
Costs = dict[str, list[dict[str, float]]]  # of each run, by side
SHARES = (1, 4)  # of a batch that may be in flight: all, a quarter


def main() -> None:
    arguments = _parse()
    size = arguments.groups * arguments.samples
    load = [str(number) for number in (arguments.groups, arguments.samples, arguments.batches)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        checkouts = {"now": ROOT}
        if arguments.base is not None:
            base = opened.enter_context(worktree(arguments.base, Path(folder) / "checkout"))
            shutil.copytree(ROOT / PARTS, base / PARTS, dirs_exist_ok=True)  # it may not have them
            checkouts["base"] = base
        model = write_random_model(Path(folder) / "model", hidden_size=64, num_layers=2)
        costs: dict[int, Costs] = {
            size // share: {side: [] for side in checkouts} for share in SHARES
        }
        for number in range(arguments.pairs):
            for max_inflight, of in costs.items():
                words = [str(model), *load, str(max_inflight)]
                for side in sorted(checkouts, reverse=number % 2 == 1):
                    of[side].append(_run_side(side, words, checkouts[side]))
    rows = [{"max_inflight": n} | _summary(of, arguments.base) for n, of in costs.items()]
    print(json.dumps({"rows": rows, "expected_ms": EXPECTED_MS}))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=32, help="of a batch")
    parser.add_argument("--samples", type=int, default=8, help="per group")
    parser.add_argument("--batches", type=int, default=12, help="counted, after two that are not")
    parser.add_argument(
        "--base", nargs="?", const=BASE, metavar="REV", help=f"this too; without REV {BASE}"
    )
    parser.add_argument("--pairs", type=int, default=3, help="of runs")
    return parser.parse_args()


def _run_side(side: str, load: list[str], checkout: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.parts.response_cost.side", *load]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=checkout)
    cost: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    words = ", ".join(f"{name} {value:.3f}" for name, value in cost.items())
    print(f"{side}, {load[-1]} in flight: ms per response: {words}", flush=True)
    return cost


def _summary(costs: Costs, base: str | None) -> dict[str, object]:
    def medians(side: str) -> dict[str, float]:
        names = costs[side][0]
        return {name: round(statistics.median(c[name] for c in costs[side]), 4) for name in names}

    now = medians("now")
    summary: dict[str, object] = {"ms_per_response": now}
    if base is None:
        return summary
    before = medians("base")
    ratios = [b["all"] / n["all"] for b, n in zip(costs["base"], costs["now"], strict=True)]
    return summary | {
        "base": base,
        "base_ms_per_response": before,
        "ratio": round(statistics.median(ratios), 3),
        "pairs": [round(ratio, 3) for ratio in ratios],
    }


if __name__ == "__main__":
    main()
