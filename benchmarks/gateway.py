"""What the recording gateway costs: added time per turn, processor time, the trainer beside it.

``python -m benchmarks.gateway [--sessions 64] [--samples 8] [--blocks 6] [--window-s 5]``, and a
``--seed``

``--sessions`` at a time, staggered, of three turns each: prompts of 750, 1,000 and 1,250 tokens,
200 tokens out, from a scripted server that answers after 1 s ± 50 %, as the request's seed says.
``--samples`` sessions are a group, as in a run, and begin with the same prompt; no other group has
it. Every other group is of chats, the others send token ids. The client is an environment in its
host process; it asks the gateway, as in a run (gateway, the producer's thread with sessions,
records and the journal of turns, fetcher), or, with the same code, the server itself, or a proxy
that passes bytes on and does nothing else: what any HTTP process in between costs on this machine.
Meanwhile the main thread of the producer's process runs micro-batches of a random Qwen3, on a core
of its own; all else shares the other one. Windows of the three kinds take turns. A turn's time is
what its client waits, less the server's own delay; ``added_ms`` are differences of percentiles,
gateway less direct, of the route where they are larger; ``proxy_ms`` the same of the proxy.
``turns_per_cpu_s`` is of the three that stand between, ``trainer_slowdown`` of a micro-batch, the
median of the blocks' ratios. The last line printed is one JSON object; the exit status is 0 if it
is as expected.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Sequence

import numpy as np
import transformers

from benchmarks.parts.gateway.sessions import ROUTES, Load, Way
from benchmarks.parts.gateway.windows import BLOCK, Window, measure
from benchmarks.parts.scratch import scratch
from easyrl.runtime.machine import allow_open_files

MOST_ADDED_MS = {50: 5.0, 99: 25.0}  # by percentile
MOST_SLOWDOWN = 0.03


def main() -> int:
    arguments = _parse()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.basicConfig(level=logging.WARNING)
    allow_open_files()
    with scratch("gateway", keep=False) as made:
        windows = []
        for window in measure(
            made.folder,
            Load(arguments.sessions, arguments.samples, arguments.seed),
            arguments.blocks,
            arguments.window_s,
        ):
            print(_line(window))
            windows.append(window)
    line, is_good = _result(windows)
    print(json.dumps(line))
    return 0 if is_good else 1


def _line(window: Window) -> str:
    turns = window.turns.number
    added = ", ".join(
        f"{route} {np.percentile(added_s, 50) * 1e3:.1f} / {np.percentile(added_s, 99) * 1e3:.1f}"
        for route, added_s in window.turns.added_s.items()
    )
    spent = ", ".join(f"{role} {1e3 * s / turns:.2f}" for role, s in window.cpu_s.items())
    return (
        f"{window.way:<7} {turns} turns; added, ms "
        f"p50 / p99: {added}; micro-batch {1e3 * window.step_s:.1f} ms; CPU ms per turn: {spent}"
    )


def _result(windows: Sequence[Window]) -> tuple[dict[str, float], bool]:
    added_ms = {p: _added_ms(windows, "gateway", p) for p in MOST_ADDED_MS}
    ratios = []
    for start in range(0, len(windows), len(BLOCK)):
        block = windows[start : start + len(BLOCK)]
        gateway_s, direct_s = (
            sum(w.step_s for w in block if w.way == way) for way in ("gateway", "direct")
        )
        ratios.append(gateway_s / direct_s)
    through = [w for w in windows if w.way == "gateway"]
    turns = sum(w.turns.number for w in through)
    slowdown = statistics.median(ratios) - 1
    line = {
        "turns_per_cpu_s": round(turns / sum(w.gateway_cpu_s for w in through), 1),
        "added_ms_p50": round(added_ms[50], 2),
        "added_ms_p99": round(added_ms[99], 2),
        "trainer_slowdown": round(slowdown, 4),
        "proxy_ms_p50": round(_added_ms(windows, "proxy", 50), 2),
        "proxy_ms_p99": round(_added_ms(windows, "proxy", 99), 2),
    }
    is_good = slowdown <= MOST_SLOWDOWN and all(
        added_ms[percentile] <= most for percentile, most in MOST_ADDED_MS.items()
    )
    return line, is_good


def _added_ms(windows: Sequence[Window], way: Way, percentile: int) -> float:
    """More than of the server asked directly, of the route where it is more."""
    by_route = []
    for route in ROUTES:
        direct_ms, way_ms = (
            1e3
            * np.percentile(
                np.concatenate([w.turns.added_s[route] for w in windows if w.way == side]),
                percentile,
            )
            for side in ("direct", way)
        )
        print(
            f"{route}, p{percentile}: {direct_ms:.2f} ms direct, {way_ms:.2f} ms through the "
            f"{way}, {way_ms - direct_ms:.2f} more"
        )
        by_route.append(float(way_ms - direct_ms))
    return max(by_route)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=64, help="at a time")
    parser.add_argument("--samples", type=int, default=8, help="of a group")
    parser.add_argument("--blocks", type=int, default=6, help="of six windows, two of each kind")
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.samples < 1:
        parser.error("--samples: at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
