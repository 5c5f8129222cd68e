"""How soon a report of a long run is seen in a browser, and how soon another batch is.

``python -m benchmarks.report [--steps 10000] [--switches 20]``

The report of a folder made up here is as heavy as one can be: lanes, spans and samples up to the
page's own limits, every metric that a run has. It is opened in headless Chromium (a Debian
package, ``chromium`` and ``chromium-driver``): seconds to the first paint and to the first
timeline, by the browser's own clock, milliseconds from asking for a batch until it is drawn, and
from asking for the samples until they are. No console error and no request to a network may
happen. Before, the seconds of the processor that writing it takes: the first time, and again when
the run has gone on by a step, as ``easyrl report --watch`` does. The last line is one JSON object;
the exit status is 0 if the first paint is within 3 s and every switch within 300 ms, with nothing
on the console.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.parts.browser import NoBrowser, opened_page
from benchmarks.parts.long_run import (
    VOCABULARY,
    LongRun,
    metrics_line,
    write_batch,
    write_long_run,
    write_samples,
)
from easyrl.build.tokenizer import token_decoder
from easyrl.report.batches import MOST_COUNTS, MOST_LANES, MOST_SPANS
from easyrl.report.collect import Collector, Decode, Verdict
from easyrl.report.newest_batches import MOST_BATCHES
from easyrl.report.page import FILE, render
from easyrl.report.samples import MOST_TOKENS_IN_ALL
from easyrl.timeline.folder import TimelineFolder

MOST_FIRST_PAINT_S, MOST_SWITCH_MS = 3.0, 300.0


def heaviest(num_steps: int, num_batches: int = MOST_BATCHES) -> LongRun:
    """Whose report has as much of everything as a page has room for."""
    return LongRun(
        num_steps,
        num_batches,
        num_endpoints=MOST_LANES,
        num_ranks=MOST_LANES,
        num_requests=MOST_COUNTS // 2,  # each is counted when it begins and when it ends
        num_failed=MOST_SPANS // (2 * MOST_LANES),
        num_sample_tokens=MOST_TOKENS_IN_ALL,
    )


def main() -> int:
    arguments = _parse()
    size = heaviest(arguments.steps, arguments.batches)
    with tempfile.TemporaryDirectory(prefix="easyrl-report-") as folder:
        run_dir = Path(folder) / "run"
        write_long_run(run_dir, size)
        decode = _decoder()
        run = Collector(run_dir, _not_checked, lambda _: decode)

        def write() -> int:
            return (run_dir / FILE).write_text(render(run.collect()))

        first_s = _processor_s(write)
        again_s = []
        for step in range(size.num_steps + 1, size.num_steps + 1 + arguments.writes):
            _go_on(run_dir, step, size)
            again_s.append(_processor_s(write))
        megabytes = (run_dir / FILE).stat().st_size / 1e6
        print(f"{arguments.steps} steps: {megabytes:.1f} MB, written in {first_s:.1f} s")
        print(f"a step later in {', '.join(f'{s:.1f}' for s in again_s)} s of a processor")
        try:
            with opened_page(run_dir / FILE) as browser:
                paint_s, timeline_s = browser.first_paint_s(), browser.wait_for_batch()
                switches = [browser.switch("previous") for _ in range(arguments.switches)]
                samples_ms = browser.samples_ms()
                among_samples = [browser.switch("next") for _ in range(arguments.switches)]
                problems = browser.problems()
        except NoBrowser as error:
            print(f"benchmarks.report: {error}", file=sys.stderr)
            return 2
    slowest_ms = max(switches + among_samples)
    median_ms = statistics.median(switches + among_samples)
    print(f"first paint {paint_s:.2f} s, first timeline {timeline_s:.2f} s")
    print(f"another batch {median_ms:.0f} ms, slowest {slowest_ms:.0f} ms")
    print(f"samples, when they are gone to: {samples_ms:.0f} ms")
    result = {
        "steps": arguments.steps,
        "first_write_s": round(first_s, 2),
        "write_again_s": [round(seconds, 2) for seconds in again_s],
        "megabytes": round(megabytes, 2),
        "first_paint_s": round(paint_s, 2),
        "first_timeline_s": round(timeline_s, 2),
        "switch_ms": round(median_ms, 1),
        "slowest_switch_ms": round(slowest_ms, 1),
        "samples_ms": round(samples_ms, 1),
        "console": problems,
    }
    print(json.dumps(result))
    is_fast = paint_s <= MOST_FIRST_PAINT_S and slowest_ms <= MOST_SWITCH_MS
    return 0 if is_fast and not problems else 1


def _go_on(run_dir: Path, step: int, size: LongRun) -> None:
    """What a run writes in one step more."""
    draw = random.Random(step)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(metrics_line(step, draw))
    write_batch(run_dir, step - 1, TimelineFolder(run_dir).read(step - 2))
    write_samples(run_dir, step, size, draw)


def _processor_s(write: Callable[[], object]) -> float:
    start_s = time.process_time()
    write()
    return time.process_time() - start_s


def _not_checked(run_dir: Path) -> Verdict:
    return Verdict("unknown", "nobody has trained this run")


def _decoder() -> Decode:
    """Of a tokenizer of as many words."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {f" w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" w0"))
    tokenizer.decoder = decoders.Fuse()
    return token_decoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batches", type=int, default=MOST_BATCHES, help="with a timeline")
    parser.add_argument("--switches", type=int, default=20, help="of each kind")
    parser.add_argument("--writes", type=int, default=3, help="behind the first")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
