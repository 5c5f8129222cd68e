"""Whether the accounts of a batch say where the time went, and whether their advice is right.

``python -m benchmarks.accounting [--batches 6] [--mode async] [--only TEXT,TEXT]``

A run against an endpoint that sleeps instead of computing, whose micro-batches sleep too, by their
tokens, so that times are known; sync and async. First as it is: what stays unexplained, of ranks
and endpoints. Then runs in which every second batch has a delay of 0.5 s in one part after another,
in both modes where both have it. It has to show in that part's cause, within 10 %; no other cause
of the lane may grow by more than 10 % of it; and the batch has to take that much longer, less what
was waited for meanwhile. Each is compared with the batch before it, whose responses are as long;
medians. Last the advice is taken: twice the places at the endpoint, and training that takes half
the time, as twice the devices would; predicted and measured gain stand side by side.
The first batch of a run is not counted. The last line is one JSON object; exit status 1 if more
than 2 % is unexplained, a delay is missed, or a gain is off by more than 5 points.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.parts.accounting.delays import write_records
from benchmarks.parts.accounting.growth import growth
from benchmarks.parts.accounting.parts import PARTS
from benchmarks.parts.accounting.runs import (
    SECONDS_PER_TOKEN,
    TRAIN_TOKEN_S,
    WORK,
    SleepingRun,
    seconds_of,
)
from benchmarks.parts.overlap.endpoint import SleepingEndpoint
from benchmarks.parts.overlap.runs import Mode
from easyrl.demo.build_model import build_tokenizer
from easyrl.simulation.advice import MORE_INFERENCE, MORE_TRAINING, expect, median_gains
from easyrl.timeline.accounting import account, most_unexplained
from easyrl.timeline.spans import BatchSpans

PLANTED_S, PLACES = 0.5, 24
MOST_UNEXPLAINED, MOST_MISSED, MOST_OFF = 0.02, 0.1, 0.05


def main() -> int:
    arguments = _parse()
    result: dict[str, Any] = {"unexplained": {}, "planted": [], "advice": []}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="easyrl-accounts-")))
        _, prompts = WORK.write(folder, 2 * arguments.batches + 2)
        write_records(prompts, folder / "episodes.jsonl", WORK.batch_size, PLANTED_S)
        tokenizer = build_tokenizer()
        urls = []
        for _ in range(max(part.num_endpoints for part in PARTS.values())):
            endpoint = SleepingEndpoint(len(tokenizer), tokenizer.eos_token_id)
            endpoint.seconds_per_token = SECONDS_PER_TOKEN
            urls.append(opened.enter_context(endpoint).url)
        runs = SleepingRun(
            folder,
            WORK,
            urls[:1],
            arguments.batches,
            PLACES,
            train_s=0,
            train_token_s=TRAIN_TOKEN_S,
        )
        plain: dict[Mode, list[list[BatchSpans]]] = {}
        for mode in arguments.modes:
            plain[mode] = runs.batches(mode)
            result["unexplained"][mode] = round(
                most_unexplained(each for of_ranks in plain[mode] for each in account(of_ranks)), 4
            )
            told = f"{mode}: unexplained {result['unexplained'][mode]:.2%} of a lane at most"
            print(told, flush=True)
        for mode, name in _of_modes(arguments.modes, arguments.only):
            result["planted"].append(_planted(name, mode, runs, urls))
        if _is_chosen("advice", arguments.only) and "async" in plain:
            for change in (MORE_TRAINING, MORE_INFERENCE):
                result["advice"].append(_taken(change, runs, plain["async"]))
    print(json.dumps(result))
    is_right = (
        all(share <= MOST_UNEXPLAINED for share in result["unexplained"].values())
        and all(row["is_right"] for row in result["planted"])
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
    name: str, mode: Mode, plain: SleepingRun, urls: Sequence[str]
) -> dict[str, str | float | bool]:
    part = PARTS[name]
    runs = replace(
        plain,
        urls=urls[: part.num_endpoints],
        num_batches=2 * plain.num_batches,
        train_token_s=0.0 if part.while_training_waits else plain.train_token_s,
    )
    batches = runs.batches(mode, part=name, planted_s=PLANTED_S, settings=part.settings)
    found = growth(part.lane, part.causes, batches)
    other, other_s = found.most_other
    wrong = {
        "missed": abs(found.own_s - PLANTED_S),
        "also elsewhere": other_s,
        "batch too long or short": abs(found.off(PLANTED_S)),
    }
    problems = [told for told, off_s in wrong.items() if off_s > MOST_MISSED * PLANTED_S]
    row: dict[str, str | float | bool] = {
        "part": name,
        "mode": mode,
        "cause": f"{part.lane}: {' + '.join(part.causes)}",
        "planted_s": PLANTED_S,
        "landed_s": round(found.own_s, 3),
        "error": round(found.own_s / PLANTED_S - 1, 3),
        "most_other": other,
        "most_other_s": round(other_s, 3),
        "batch_s": round(found.wall_s, 3),
        "batch_off_s": round(found.off(PLANTED_S), 3),
        "is_right": not problems,
    }
    told = (
        "{mode}, {part}: {landed_s} s in {cause}; of others {most_other} most, {most_other_s} s; "
        "the batch {batch_s} s ({batch_off_s} off)"
    )
    sign = f"  <-- {', '.join(problems)}" if problems else ""
    print(told.format(**row) + sign, flush=True)
    return row


def _taken(
    change: str, runs: SleepingRun, plain: Sequence[Sequence[BatchSpans]]
) -> dict[str, str | float]:
    """Predicted from the plain run, and measured in one that has what was advised."""
    expected = expect([each for of_ranks in plain for each in of_ranks], synchronous=False)
    predicted = median_gains(expected)[change]
    if change == MORE_TRAINING:
        taken = replace(runs, train_token_s=TRAIN_TOKEN_S / 2).batches("async")
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
    parser.add_argument("--batches", type=int, default=6, help="that are held up, of each run")
    parser.add_argument("--mode", choices=["sync", "async"], help="one of them; default: both")
    told = "parts whose name contains one of these, separated by commas; advice: none"
    parser.add_argument("--only", default="", help=told)
    arguments = parser.parse_args()
    arguments.modes = ("sync", "async") if arguments.mode is None else (arguments.mode,)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
