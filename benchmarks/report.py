"""How soon a report of a long run is seen in a browser, and how soon another batch is.

``python -m benchmarks.report [--steps 10000] [--switches 20]``

The report of a folder made up here is opened in headless Chromium (a Debian package, ``chromium``
and ``chromium-driver``): seconds to the first paint and to the first timeline, by the browser's own
clock, and milliseconds from asking for a batch until it is drawn. No console error and no request
to a network may happen. The last line is one JSON object; the exit status is 0 if the first paint
is within 3 s and switching within 300 ms, in the median, with nothing on the console.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.parts.browser import NoBrowser, opened_page
from benchmarks.parts.long_run import write_long_run
from easyrl.config import Config
from easyrl.report.collect import Decode, Verdict, collect
from easyrl.report.page import FILE, render

MOST_FIRST_PAINT_S, MOST_SWITCH_MS = 3.0, 300.0


def main() -> int:
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="easyrl-report-") as folder:
        run_dir = Path(folder) / "run"
        write_long_run(
            run_dir,
            num_steps=arguments.steps,
            num_batches=arguments.batches,
            num_endpoints=arguments.endpoints,
        )
        start_s = time.monotonic()
        page = render(collect(run_dir, _not_checked, _numbers))
        made_s = time.monotonic() - start_s
        (run_dir / FILE).write_text(page)
        print(f"{arguments.steps} steps: {len(page) / 1e6:.1f} MB, made in {made_s:.1f} s")
        try:
            with opened_page(run_dir / FILE) as browser:
                paint_s, timeline_s = browser.first_paint_s(), browser.wait_for_batch()
                switches = [browser.switch("previous") for _ in range(arguments.switches)]
                problems = browser.problems()
        except NoBrowser as error:
            print(f"benchmarks.report: {error}", file=sys.stderr)
            return 2
    switch_ms = statistics.median(switches)
    print(f"first paint {paint_s:.2f} s, first timeline {timeline_s:.2f} s")
    print(f"another batch {switch_ms:.0f} ms (slowest {max(switches):.0f} ms)")
    result = {
        "steps": arguments.steps,
        "made_s": round(made_s, 2),
        "megabytes": round(len(page) / 1e6, 2),
        "first_paint_s": round(paint_s, 2),
        "first_timeline_s": round(timeline_s, 2),
        "switch_ms": round(switch_ms, 1),
        "slowest_switch_ms": round(max(switches), 1),
        "console": problems,
    }
    print(json.dumps(result))
    is_fast = paint_s <= MOST_FIRST_PAINT_S and switch_ms <= MOST_SWITCH_MS
    return 0 if is_fast and not problems else 1


def _not_checked(run_dir: Path) -> Verdict:
    return Verdict("unknown", "nobody has trained this run")


def _numbers(config: Config) -> Decode:
    return lambda token_ids: " ".join(map(str, token_ids))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batches", type=int, default=200, help="with a timeline")
    parser.add_argument("--endpoints", type=int, default=8)
    parser.add_argument("--switches", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
