"""What EasyRL says to a user's mistakes: whether each is named, with the remedy, and soon.

``python -m benchmarks.bad_input [--only TEXT] [--show]``

Every kind of ``parts/bad_input`` is made in a folder of its own, by the command a user would type,
which runs its own ``main`` in a copy of a process that has imported everything: seconds are beyond
imports (those of processes that it starts count). Two at a time; one that seems slow is run once
more, alone, and the shorter time counts: the machine has other work, too. What is clear is
``parts.bad_input.rule``'s to say, the same for all. Three times are shortened, with which
only waiting shows a mistake: servers are waited for 2 s (``inference.startup_timeout_s``, 300 by
default), rewards have 1 s (``timeout_s``, 30), a folder in use is waited for 1 s
(``trainer.grace_s``, 60). The last line printed is one JSON object; the exit status is 0 if all
kinds are clear and fast.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts.bad_input import (
    config,
    data,
    endpoints,
    models,
    paths,
    recipes,
    rewards,
)
from benchmarks.parts.bad_input.process import ForkedCommand, import_everything
from benchmarks.parts.bad_input.rule import Outcome, message_of, traceback_in, unclear
from benchmarks.parts.bad_input.scene import Mistake, Scene
from benchmarks.parts.bad_input.servers import wrong_servers

AREAS = {
    "config": config.MISTAKES,
    "data": data.MISTAKES,
    "rewards": rewards.MISTAKES,
    "recipes": recipes.MISTAKES,
    "models": models.MISTAKES,
    "paths": paths.MISTAKES,
    "endpoints": endpoints.MISTAKES,
}
MOST_SECONDS = 5.0
LIMIT_S = 30.0  # then it is ended
AT_A_TIME = 2
POLL_S = 0.01


@dataclass(frozen=True)
class Verdict:
    """What the rule says of one kind."""

    name: str  # area: title
    outcome: Outcome
    problems: list[str]

    @property
    def is_slow(self) -> bool:
        return self.outcome.seconds > MOST_SECONDS

    def __str__(self) -> str:
        found = [*self.problems, *(["slow"] if self.is_slow else [])]
        return f"{self.outcome.seconds:5.1f} s  {self.name}: {'; '.join(found) or 'clear'}"


@dataclass(frozen=True)
class Bench:
    """What all kinds share, and runs them."""

    folder: Path
    model: Path  # the good one
    urls: dict[str, str]  # of servers, by name
    show: bool  # clear messages too

    def judge(self, kinds: Sequence[tuple[str, Mistake]]) -> list[Verdict]:
        """Runs all ``kinds``, then the slow ones again."""
        verdicts = self._run(kinds, self.folder / "all", AT_A_TIME)
        slow = {verdict.name for verdict in verdicts if verdict.is_slow}
        if not slow:
            return verdicts
        print(f"{len(slow)} slow ones once more, one at a time:", flush=True)
        again = [(name, mistake) for name, mistake in kinds if name in slow]
        second = {v.name: v for v in self._run(again, self.folder / "again", 1)}
        return [min(v, second.get(v.name, v), key=lambda v: v.outcome.seconds) for v in verdicts]

    def _run(
        self, kinds: Sequence[tuple[str, Mistake]], folder: Path, at_a_time: int
    ) -> list[Verdict]:
        """Runs ``kinds`` and prints a line for each as it ends."""
        verdicts: list[Verdict] = []
        waiting = list(enumerate(kinds))[::-1]
        running: list[tuple[str, Mistake, Scene, ForkedCommand]] = []
        while waiting or running:
            while waiting and len(running) < at_a_time:
                number, (name, mistake) = waiting.pop()
                scene = Scene(folder / f"{number:03}", self.model, self.urls)
                argv = scene.set_up(mistake)
                command = ForkedCommand(argv, scene.folder, mistake.environment, LIMIT_S)
                running.append((name, mistake, scene, command))
            time.sleep(POLL_S)
            for entry in list(running):
                name, mistake, scene, command = entry
                if (outcome := command.outcome()) is None:
                    continue
                running.remove(entry)
                locations = [scene.fill(location) for location in mistake.locations]
                problems = unclear(outcome, locations, mistake.status, str(folder))
                verdicts.append(Verdict(name, outcome, problems))
                print(verdicts[-1], flush=True)
                if self.show or problems or verdicts[-1].is_slow:
                    print("    | " + message_of(outcome.text).replace("\n", "\n    | "), flush=True)
                shutil.rmtree(scene.folder)
        return verdicts


def main() -> int:
    arguments = _parse()
    # a fork must not inherit threads; nothing is fetched
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])  # of servers, elsewhere
    kinds = [
        (f"{area}: {mistake.title}", mistake)
        for area, mistakes in AREAS.items()
        for mistake in mistakes
        if arguments.only in f"{area}: {mistake.title}"
    ]
    folder = Path(tempfile.mkdtemp(prefix="easyrl-bad-input-"))
    try:
        with ExitStack() as opened:
            urls = opened.enter_context(wrong_servers())  # before there is a thread
            model = prepare(folder, urls, opened)
            verdicts = Bench(folder, model, urls, arguments.show).judge(kinds)
    finally:
        shutil.rmtree(folder)
    result = {
        "kinds": len(verdicts),
        "unclear": sum(bool(verdict.problems) for verdict in verdicts),
        "slow": sum(verdict.is_slow for verdict in verdicts),
        "tracebacks": sum(traceback_in(verdict.outcome.text) for verdict in verdicts),
    }
    print(json.dumps(result))
    return 0 if result == {"kinds": len(kinds), "unclear": 0, "slow": 0, "tracebacks": 0} else 1


def prepare(folder: Path, urls: dict[str, str], opened: ExitStack) -> Path:
    """The good model, a server of another one, and all imports."""
    from transformers.utils.logging import disable_progress_bar

    from benchmarks.parts.random_model import write_random_model
    from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess

    disable_progress_bar()
    model = write_random_model(folder / "good", hidden_size=32, num_layers=1)
    other = write_random_model(folder / "other", hidden_size=64, num_layers=1)
    server = opened.enter_context(EmbeddedServerProcess(other, ["--num-threads", "1"]))
    urls["other-model"] = server.url
    urls["tls-of-good"] = urls["good"].replace("http", "https")
    import_everything(model)
    return model


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="kinds whose 'area: title' contains this")
    parser.add_argument("--show", action="store_true", help="print clear messages too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
