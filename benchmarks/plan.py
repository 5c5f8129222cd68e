"""How well ``easyrl plan`` predicts a batch that it was not calibrated on.

``python -m benchmarks.plan [--batches 6]``

Runs against endpoints that sleep instead of computing, with micro-batches that sleep too, since two
cores do not become faster by being more. The simulation is calibrated on the timelines of two runs,
means of their rates, and says how long a batch of seven others takes: of another number of
endpoints, places, ranks, prompts, responses, of other lengths, synchronous. Their medians are
measured in the same go. Last, the time in which the best division of 10,000 devices is found. The
last line is one JSON object; exit status 1 if the median error is over 5 %, one over 10 %, or that
time over a minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.parts.accounting.runs import (
    SECONDS_PER_TOKEN,
    TRAIN_S,
    WORK,
    SleepingRun,
    seconds_of,
)
from benchmarks.parts.overlap.endpoint import SleepingEndpoint
from benchmarks.parts.overlap.runs import Mode, Workload
from easyrl.demo.build_model import build_tokenizer
from easyrl.simulation.calibrate import Calibration, calibrate
from easyrl.simulation.pipeline import simulate
from easyrl.simulation.setting import Lengths, Rates, Setting
from easyrl.simulation.split import splits_of
from easyrl.timeline.spans import BatchSpans

MOST_MEDIAN, MOST_ERROR, MOST_PLAN_S = 0.05, 0.10, 60.0


@dataclass(frozen=True)
class Case:
    """A run that is measured."""

    name: str
    work: Workload = WORK
    endpoints: int = 1
    places: int = 24
    mode: Mode = "async"
    ranks: int = 1


CALIBRATED_ON = (Case("24 places"), Case("sync, 12 places", places=12, mode="sync"))
PREDICTED = (
    Case("12 places", places=12),
    Case("sync, 24 places", mode="sync"),
    Case("2 endpoints of 12 places", endpoints=2, places=12),
    Case("20 prompts", work=replace(WORK, batch_size=20)),
    Case("8 responses of 6 prompts", work=replace(WORK, batch_size=6, num_generations=8)),
    Case("2 ranks", ranks=2),
    Case("responses twice as long", work=replace(WORK, min_tokens=80, max_tokens=240)),
)


def main() -> int:
    arguments = _parse()
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="easyrl-plan-")))
        tokenizer = build_tokenizer()
        endpoints = []
        for _ in range(2):
            endpoint = SleepingEndpoint(len(tokenizer), tokenizer.eos_token_id)
            endpoint.seconds_per_token = SECONDS_PER_TOKEN
            endpoints.append(opened.enter_context(endpoint))

        def measured(case: Case) -> list[list[BatchSpans]]:
            own = folder / str((*CALIBRATED_ON, *PREDICTED).index(case))
            own.mkdir()
            case.work.write(own, arguments.batches + 2)
            urls = [endpoint.url for endpoint in endpoints[: case.endpoints]]
            run = SleepingRun(
                *(own, case.work, urls, arguments.batches, case.places, TRAIN_S),
                num_ranks=case.ranks,
            )
            return run.batches(case.mode)

        found = [_calibrated(case, measured(case)) for case in CALIBRATED_ON]
        rates = _mean([calibration.setting.rates for calibration in found])
        rows: list[dict[str, Any]] = []
        for case in (*CALIBRATED_ON, *PREDICTED):
            batches = None if case in CALIBRATED_ON else measured(case)
            seconds = (
                found[CALIBRATED_ON.index(case)].step_s if batches is None else seconds_of(batches)
            )
            predicted = simulate(_setting(case, rates)).step_s
            error = predicted / seconds - 1
            row = {
                "setting": case.name,
                "predicted_s": round(predicted, 3),
                "measured_s": round(seconds, 3),
                "error": round(error, 3),
            }
            own = "  (calibrated on it)" if batches is None else ""
            print("{setting}: {predicted_s} s, measured {measured_s} s".format(**row) + own)
            if batches is not None:
                rows.append(row)
    median = statistics.median(abs(row["error"]) for row in rows)
    large_s = _large(rates)
    result = {
        "calibrated_on": [case.name for case in CALIBRATED_ON],
        "rows": rows,
        "median_error": round(median, 3),
        "seconds_for_10000_devices": round(large_s, 1),
    }
    print(json.dumps(result))
    is_right = median <= MOST_MEDIAN and all(abs(row["error"]) <= MOST_ERROR for row in rows)
    return 0 if is_right and large_s <= MOST_PLAN_S else 1


def _calibrated(case: Case, batches: Sequence[Sequence[BatchSpans]]) -> Calibration:
    return calibrate(
        batches,
        places=case.places,
        batch_size=case.work.batch_size,
        group_size=case.work.num_generations,
        mode=case.mode,
    )


def _mean(rates: Sequence[Rates]) -> Rates:
    return Rates(*(statistics.mean(each) for each in zip(*map(astuple, rates), strict=True)))


def _setting(case: Case, rates: Rates) -> Setting:
    """Lengths are uniform, as the endpoint draws them."""
    work = case.work
    return Setting(
        rates,
        Lengths(tuple(range(work.min_tokens, work.max_tokens + 1))),
        endpoints=case.endpoints,
        places=case.places,
        ranks=case.ranks,
        batch_size=work.batch_size,
        group_size=work.num_generations,
        prompt_tokens=work.prompt_tokens,
        mode=case.mode,
    )


def _large(rates: Rates) -> float:
    """Seconds of what ``easyrl plan --devices 10000`` does: its best division is looked for."""
    setting = Setting(
        rates,
        Lengths(mean=2000, sigma=0.8, longest=16_000),
        endpoints=1,
        places=32,
        ranks=1,
        batch_size=16_384,
        group_size=16,
        prompt_tokens=512,
    )
    start_s = time.monotonic()
    tried = splits_of(10_000, setting)
    seconds = time.monotonic() - start_s
    best = tried[0]
    print(
        f"10,000 devices: {len(tried)} divisions tried in {seconds:.1f} s; "
        f"{best.setting.endpoints:,} endpoints and {best.setting.ranks:,} ranks take "
        f"{best.outcome.step_s:.0f} s a batch"
    )
    return seconds


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=6)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
