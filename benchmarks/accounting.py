"""Whether the accounts of a batch say where the time went, and whether their advice is right.

``python -m benchmarks.accounting [--batches 6] [--mode async] [--only TEXT,TEXT]``

A run against an endpoint that sleeps instead of computing, whose micro-batches sleep too, so that
times are known; sync and async. First as it is: what stays unexplained, of ranks and endpoints.
Then with a delay of 0.5 s in one part of each batch after another, in both modes where both have
it: it has to show in that part's cause, within 10 %. Last the advice is taken: twice the places at
the endpoint, and training that takes half the time, as twice the devices would; predicted and
measured gain stand side by side.
The first batch of a run is not counted. The last line is one JSON object; exit status 1 if more
than 2 % is unexplained, a delay is missed, or a gain is off by more than 5 points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.parts.accounting.planted import PARTS
from benchmarks.parts.accounting.runs import (
    SECONDS_PER_TOKEN,
    TRAIN_S,
    WORK,
    SleepingRun,
    seconds_of,
)
from benchmarks.parts.accounting.unexplained import most_unexplained
from benchmarks.parts.overlap.endpoint import SleepingEndpoint
from benchmarks.parts.overlap.runs import Mode
from easyrl.demo.build_model import build_tokenizer
from easyrl.simulation.advice import MORE_INFERENCE, MORE_TRAINING, expect, median_gains
from easyrl.timeline.accounting import account
from easyrl.timeline.spans import BatchSpans, is_endpoint, is_rank

PLANTED_S, PLACES = 0.5, 24
MOST_UNEXPLAINED, MOST_MISSED, MOST_OFF = 0.02, 0.1, 0.05


def main() -> int:
    arguments = _parse()
    result: dict[str, Any] = {"unexplained": {}, "planted": [], "advice": []}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="easyrl-accounts-")))
        WORK.write(folder, arguments.batches + 2)
        tokenizer = build_tokenizer()
        endpoint = opened.enter_context(SleepingEndpoint(len(tokenizer), tokenizer.eos_token_id))
        endpoint.seconds_per_token = SECONDS_PER_TOKEN
        runs = SleepingRun(folder, WORK, [endpoint.url], arguments.batches, PLACES, TRAIN_S)
        plain: dict[Mode, list[list[BatchSpans]]] = {}
        for mode in arguments.modes:
            plain[mode] = runs.batches(mode)
            result["unexplained"][mode] = round(
                most_unexplained(each for of_ranks in plain[mode] for each in account(of_ranks)), 4
            )
            print(f"{mode}: unexplained {result['unexplained'][mode]:.2%} of a lane at most")
        waiting = replace(runs, train_s=0.0)
        before: dict[tuple[Mode, bool, tuple[str, ...]], list[list[BatchSpans]]] = {}
        for mode, name in _of_modes(arguments.modes, arguments.only):
            part = PARTS[name]
            of_runs = waiting if part.while_training_waits else runs
            key = (mode, part.while_training_waits, part.settings)
            if key not in before:
                is_plain = not part.while_training_waits and not part.settings
                before[key] = (
                    plain[mode] if is_plain else of_runs.batches(mode, settings=part.settings)
                )
            result["planted"].append(_planted(name, mode, of_runs, before[key]))
        if _is_chosen("advice", arguments.only) and "async" in plain:
            for change in (MORE_TRAINING, MORE_INFERENCE):
                result["advice"].append(_taken(change, runs, plain["async"]))
    print(json.dumps(result))
    is_right = (
        all(share <= MOST_UNEXPLAINED for share in result["unexplained"].values())
        and all(abs(row["error"]) <= MOST_MISSED for row in result["planted"])
        and all(abs(row["off"]) <= MOST_OFF for row in result["advice"])
    )
    return 0 if is_right else 1


def _of_modes(modes: Sequence[Mode], only: str) -> Iterator[tuple[Mode, str]]:
    """Each part that is asked for, in each mode that has it."""
    for mode in modes:
        for name, part in PARTS.items():
            if _is_chosen(name, only) and (mode == "async" or part.in_sync):
                yield mode, name


def _is_chosen(name: str, only: str) -> bool:
    return any(text in name for text in only.split(","))


def _planted(
    name: str, mode: Mode, runs: SleepingRun, plain: Sequence[Sequence[BatchSpans]]
) -> dict[str, str | float]:
    part = PARTS[name]
    held_up = runs.batches(mode, part=name, planted_s=PLANTED_S, settings=part.settings)
    before, after = (_seconds_of(name, batches) for batches in (plain, held_up))
    row: dict[str, str | float] = {
        "part": name,
        "mode": mode,
        "cause": f"{part.lane}: {' + '.join(part.causes)}",
        "planted_s": PLANTED_S,
        "landed_s": round(after - before, 3),
        "error": round((after - before) / PLANTED_S - 1, 3),
    }
    sign = "" if abs(float(row["error"])) <= MOST_MISSED else "  <-- missed"
    print("{mode}, {part}: {landed_s} s in {cause}".format(**row) + sign, flush=True)
    return row


def _seconds_of(name: str, batches: Sequence[Sequence[BatchSpans]]) -> float:
    """A batch's in the causes of a part, the median."""
    part = PARTS[name]
    is_own = is_rank if part.lane == "rank" else is_endpoint
    return statistics.median(
        sum(each.causes.get(cause, 0.0) for cause in part.causes)
        for of_ranks in batches
        for each in account(of_ranks)
        if is_own(each.lane)
    )


def _taken(
    change: str, runs: SleepingRun, plain: Sequence[Sequence[BatchSpans]]
) -> dict[str, str | float]:
    """Predicted from the plain run, and measured in one that has what was advised."""
    expected = expect([each for of_ranks in plain for each in of_ranks], synchronous=False)
    predicted = median_gains(expected)[change]
    if change == MORE_TRAINING:
        taken = replace(runs, train_s=TRAIN_S / 2).batches("async")
    else:
        taken = replace(runs, places=2 * PLACES).batches("async")
    before, after = seconds_of(plain), seconds_of(taken)
    measured = 1 - after / before
    print(f"twice the {change}: predicted to save {predicted:.1%}, saves {measured:.1%}")
    return {
        "change": f"twice the {change}",
        "predicted": round(predicted, 3),
        "measured": round(measured, 3),
        "off": round(predicted - measured, 3),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--mode", choices=["sync", "async"], help="one of them; default: both")
    told = "parts whose name contains one of these, separated by commas; advice: none"
    parser.add_argument("--only", default="", help=told)
    arguments = parser.parse_args()
    arguments.modes = ("sync", "async") if arguments.mode is None else (arguments.mode,)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
