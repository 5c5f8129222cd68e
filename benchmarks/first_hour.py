"""The first hour of a new user: how soon something is seen, and what usual mistakes are told.

``python -m benchmarks.first_hour [--only TEXT] [--show] [--no-runs]``

Three good runs are started as users start them, each in a folder with nothing in it: ``easyrl init
--yes`` and ``easyrl up``, the demo, and a script with ``train_policy`` and the model that the first
has built. Seconds count from the command to its first line, to the first response on the console
and to the row of the first optimizer step; building the demo's model is among them. Then each
mistake of ``parts/first_hour`` is made as ``benchmarks.bad_input`` makes its own: seconds are
beyond imports, and servers are waited for 2 s (``inference.startup_timeout_s``, 300 by default);
lines are those that a good start does not print; whether the message names the place is
``parts.bad_input.rule``'s to say. What is expected stands beside. The last line printed is one JSON
object; the exit status is 0 if all is as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.bad_input import LIMIT_S, prepare
from benchmarks.parts.bad_input.process import ForkedCommand
from benchmarks.parts.bad_input.rule import Outcome, unclear
from benchmarks.parts.bad_input.scene import Mistake, Scene
from benchmarks.parts.bad_input.servers import wrong_servers
from benchmarks.parts.first_hour.mistakes import MISTAKES
from benchmarks.parts.first_hour.starts import Seen, start_all

MOST_FIRST_LINE_S, MOST_SECONDS, MOST_LINES = 2.0, 5.0, 5
# what a good start prints too: where the run goes, phases, arithmetic, a notice of the recipe's
_OF_START = re.compile(
    r"easyrl(?: up)?: (?:.* \d+\.\d s|.* Ctrl-C ends all|train_policy of .*|.* \d+ s so far"
    r"|.*; a batch has .*|\d+ steps? \(.*)$|recipe\.clip_eps_low and .*|http://\S+ answers$"
)


def main() -> int:
    arguments = _parse()
    os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])  # of what is started
    folder = Path(tempfile.mkdtemp(prefix="easyrl-first-hour-"))
    seen: dict[str, Seen] = {}
    try:
        if not arguments.no_runs:
            for name, times in start_all(folder / "runs"):
                seen[name] = times
                print(f"{name}: {times}; expected: first line within {MOST_FIRST_LINE_S:.0f} s")
        told = _all_mistakes(folder, arguments.only, arguments.show)
    finally:
        shutil.rmtree(folder)
    result = {
        "first_line_s": {name: times.first_line_s for name, times in seen.items()},
        "first_sample_s": {name: times.first_sample_s for name, times in seen.items()},
        "first_step_s": {name: times.first_step_s for name, times in seen.items()},
        "mistakes": told,
    }
    print(json.dumps(result))
    is_soon = all(times.first_line_s <= MOST_FIRST_LINE_S for times in seen.values())
    return 0 if is_soon and all(map(_as_expected, told)) else 1


def _all_mistakes(folder: Path, only: str, show: bool) -> list[dict[str, Any]]:
    """One after another, in forks of a process that has imported everything."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork must not inherit threads
    folder.mkdir(exist_ok=True)
    told = []
    with ExitStack() as opened:
        urls = opened.enter_context(wrong_servers())
        model = prepare(folder, urls, opened)
        print(f"mistakes; expected: {MOST_SECONDS:.0f} s, {MOST_LINES} lines, the place named")
        for number, mistake in enumerate(MISTAKES):
            if only not in mistake.title:
                continue
            scene = Scene(folder / f"{number:02}", model, urls)
            outcome = _outcome(mistake, scene)
            told.append(_measured(mistake, scene, outcome))
            sign = "" if _as_expected(told[-1]) else "  <-- not as expected"
            print("{seconds:5.1f} s {lines:3d} lines  {name}".format(**told[-1]) + sign, flush=True)
            if show or sign:
                print("    | " + outcome.text.strip().replace("\n", "\n    | "), flush=True)
    return told


def _outcome(mistake: Mistake, scene: Scene) -> Outcome:
    argv = scene.set_up(mistake)
    command = ForkedCommand(argv, scene.folder, mistake.environment, LIMIT_S)
    while (outcome := command.outcome()) is None:
        time.sleep(0.01)
    return outcome


def _measured(mistake: Mistake, scene: Scene, outcome: Outcome) -> dict[str, Any]:
    locations = [scene.fill(location) for location in mistake.locations]
    problems = unclear(outcome, locations, mistake.status, str(scene.folder.parent))
    printed = [line for line in outcome.text.splitlines() if line.strip()]
    return {
        "name": mistake.title,
        "seconds": round(outcome.seconds, 2),
        "lines": sum(not _OF_START.match(line) for line in printed),
        "names_key": not any(problem.startswith("does not name") for problem in problems),
        "unclear": problems,
    }


def _as_expected(told: dict[str, Any]) -> bool:
    is_short = told["seconds"] <= MOST_SECONDS and told["lines"] <= MOST_LINES
    return is_short and told["names_key"] and not told["unclear"]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="mistakes whose name contains this")
    parser.add_argument("--show", action="store_true", help="print all messages")
    parser.add_argument("--no-runs", action="store_true", help="only the mistakes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
