"""Training runs among endpoints, disks and strangers that do what they should not.

``python -m benchmarks.hostile [--part endpoints|episodes] [--runs 14] [--seed 0]
[--only BEHAVIOUR …] [--list]``

With ``--part episodes`` it is environments and clients of the gateway that misbehave, among others
that do not, with two healthy servers (``parts/hostile/episodes``): every prompt has to have been
trained once, or replaced with a reason where its environment leaves nothing to train, and what is
trained has to be what each client was answered. Runs of failures alone, or without what is needed,
have to end with their status, and one of a thousand rollouts to keep to ``max_rollouts``. What
follows is of the other part, ``endpoints``.

Each run trains with two healthy embedded servers beside several hostile endpoints, each with a
behaviour of its own; meanwhile strangers come to its ports and its files change, and it is killed,
its files are damaged, and it is resumed. To one more run, of two ranks, come all strangers: to each
port that ranks listen on, for each other too. Every behaviour has to have happened; of a stranger's
only connections that came about count. Afterwards every prompt has to have been trained once,
``easyrl verify`` has to say on-policy, and the log-probability of every trained token is computed
again under its batch's weights by a plain ``transformers`` model. So it is in the run whose only
sound endpoint restarts again and again beside one that lies (``parts/hostile/mixtures.py``). Runs
without any sound endpoint have to end with one sentence. The last line printed is one JSON object;
the exit status is 0 if all that held.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from benchmarks.parts.chaos.attempt import Attempt, StartAttempt
from benchmarks.parts.chaos.verdict import certificate_verdict
from benchmarks.parts.hostile.alone import Alone, runs_alone
from benchmarks.parts.hostile.behaviour import SocketBehaviour
from benchmarks.parts.hostile.catalogue import BEHAVIOURS
from benchmarks.parts.hostile.endpoint import HostileEndpoint, Stranger
from benchmarks.parts.hostile.episodes.catalogue import BEHAVIOURS as EPISODE_BEHAVIOURS
from benchmarks.parts.hostile.episodes.part import DEFAULT_RUNS, list_episodes, run_episodes
from benchmarks.parts.hostile.files import RunFiles
from benchmarks.parts.hostile.mixtures import MOST_ENDPOINTS, plan_mixtures
from benchmarks.parts.hostile.plan import RunPlan, plan_ranks, plan_runs
from benchmarks.parts.hostile.run import HostileRun
from benchmarks.parts.hostile.statuses import PROMPT_TOKENS
from benchmarks.parts.hostile.verdict import Total
from benchmarks.parts.launched_run import start_servers
from benchmarks.parts.ledger import dataset_order, read_ledger
from benchmarks.parts.random_model import write_prompts, write_random_model
from benchmarks.parts.scratch import scratch
from benchmarks.parts.trained_contents import check_trained_contents
from easyrl.config import SHARED_MEMORY
from easyrl.runtime.loop_thread import LoopThread

CONFIG = "benchmarks/hostile.yaml"
KEY_VARIABLE, KEY = "EASYRL_HOSTILE_KEY", "sk-hostile-0123456789"  # sent to all endpoints
NUM_RUNS = 14
NUM_HEALTHY = 2
NUM_RANKS = 2  # of the run that all strangers come to
BATCHES_OF_RANKS = 22  # time for all of them; with more, late steps move too little to be seen
NUM_ALONE = 4  # hostile endpoints of a run without healthy ones, at most
BATCH_SIZE, NUM_BATCHES = 8, 7
MAX_MODEL_LEN = 64
MOST_KEY_BYTES = 2**26  # of a file that is searched: no sparse terabyte


@dataclass(frozen=True)
class Site:
    """What all runs share."""

    folder: Path
    model: Path
    healthy: Sequence[str]  # URLs
    hostile: Sequence[HostileEndpoint]
    thread: LoopThread
    stranger: Stranger
    weights: Path  # where runs' artefacts go
    seed: int
    patience_s: float
    overrides: Sequence[str]


def main() -> int:
    arguments = _parse()
    if arguments.list and arguments.part == "episodes":
        list_episodes()
        return 0
    if arguments.list:
        for behaviour in BEHAVIOURS.values():
            print(f"{behaviour.kind:<9} {behaviour.name:<30} {behaviour.says}")
        return 0
    disable_progress_bar()
    os.environ[KEY_VARIABLE] = KEY  # of every run
    with scratch("hostile", keep=True) as made:
        if arguments.part == "episodes":
            good = run_episodes(
                made.folder,
                [EPISODE_BEHAVIOURS[name] for name in arguments.only or EPISODE_BEHAVIOURS],
                DEFAULT_RUNS if arguments.runs is None else arguments.runs,
                arguments.seed,
                arguments.patience,
                arguments.overrides,
            )
        else:
            good = _benchmark(arguments, made.folder)
        made.keep = arguments.keep or not good
    return 0 if good else 1


def _benchmark(arguments: argparse.Namespace, folder: Path) -> bool:
    chosen = [BEHAVIOURS[name] for name in arguments.only or BEHAVIOURS]
    num_runs = min(NUM_RUNS if arguments.runs is None else arguments.runs, len(chosen))
    chosen = chosen if num_runs else []
    strangers = [behaviour for behaviour in chosen if isinstance(behaviour, SocketBehaviour)]
    plans = plan_runs(chosen, num_runs, NUM_BATCHES, arguments.seed)
    most = max((len(plan.endpoints) for plan in plans), default=NUM_ALONE)
    print(f"{len(chosen)} behaviours in {num_runs} runs, up to {most} hostile endpoints; {folder}")
    total, start_s = Total(), time.monotonic()
    with ExitStack() as opened:
        site = _open_site(arguments, folder, max(most, MOST_ENDPOINTS), opened)
        for num_ranks in (1, NUM_RANKS) if strangers else (1,):
            _run(site, RunPlan(-1, 0, (), (), num_ranks=num_ranks), total)
        if total.problems:
            print("a calm run failed: nothing can be told", file=sys.stderr)
            return False
        for plan in plans:
            _run(site, plan, total)
        missed = [behaviour for behaviour in chosen if not total.happened[behaviour.name]]
        if missed:  # once more: its moment may not have come
            num_more = -(-len(missed) // max(most, 1))
            for plan in plan_runs(missed, num_more, NUM_BATCHES, arguments.seed + 1):
                _run(site, replace(plan, number=plan.number + num_runs), total)
        for behaviour in missed:
            if not total.happened[behaviour.name]:
                total.problems.append(f"{behaviour.name} never happened")
        _run_ranks(site, strangers, total)
        if not arguments.only:
            for plan in plan_mixtures(arguments.seed):
                _run(site, plan, total)
            _run_alone(site, total)
    for problem in total.problems:
        print(problem)
    calm = ", ".join(f"{mb:.0f} MB ({ranks} ranks)" for ranks, mb in total.calm_mb.items())
    print(f"{time.monotonic() - start_s:.0f} s; calm runs: {calm}")
    print(json.dumps(total.line()))
    return total.is_good()


def _open_site(
    arguments: argparse.Namespace, folder: Path, num_hostile: int, opened: ExitStack
) -> Site:
    model = write_random_model(folder / "model", hidden_size=32, num_layers=2, weight_std=0.3)
    other = write_random_model(
        folder / "other", hidden_size=32, num_layers=2, weight_std=0.3, seed=1
    )
    options = ["--max-model-len", str(MAX_MODEL_LEN)]
    servers = start_servers("embedded", model, NUM_HEALTHY, folder, opened, options)
    thread = opened.enter_context(LoopThread("hostile"))
    hostile = [HostileEndpoint(model, other, MAX_MODEL_LEN) for _ in range(num_hostile)]
    for endpoint in hostile:
        thread.run(endpoint.open())
        opened.callback(lambda endpoint=endpoint: thread.run(endpoint.close()))
    stranger = Stranger()
    thread.run(stranger.open())
    opened.callback(lambda: thread.run(stranger.close()))
    weights = Path(tempfile.mkdtemp(prefix="easyrl-hostile-", dir=SHARED_MEMORY))
    opened.callback(shutil.rmtree, weights, ignore_errors=True)
    return Site(
        folder,
        model,
        [server.url for server in servers],
        hostile,
        thread,
        stranger,
        weights,
        arguments.seed,
        arguments.patience,
        arguments.overrides,
    )


def _run(site: Site, plan: RunPlan, total: Total) -> None:
    """One run of ``plan``, with what is to be said of it."""
    name = "calm" if plan.number < 0 else f"run-{plan.number}"
    name += f"-of-{plan.num_ranks}-ranks" if plan.num_ranks > 1 else ""
    num_prompts = (NUM_BATCHES if plan.num_ranks == 1 else BATCHES_OF_RANKS) * BATCH_SIZE
    prompts = write_prompts(site.folder / f"{name}.jsonl", num_prompts, PROMPT_TOKENS, plan.seed)
    (weights := site.weights / name).mkdir()
    files = RunFiles(site.folder / name, weights, prompts)
    # a calm run has as many endpoints as any other
    behaviours = plan.endpoints or (None,) * len(site.hostile)
    hostile = site.hostile[: len(behaviours)]
    for number, (endpoint, behaviour) in enumerate(zip(hostile, behaviours, strict=True)):
        endpoint.set_behaviour(behaviour, random.Random(f"{plan.seed} {number}"))
        endpoint.elsewhere = site.stranger.url
        # what a run left paused, or with an update open, is the next one's matter; not its weights
        site.thread.run(endpoint.restart(endpoint.model))
    healthy = site.healthy if plan.beside_healthy else ()
    urls = [*healthy, *(endpoint.url for endpoint in hostile)]
    log = site.folder / f"{name}.log"
    start = _attempts(site, files, urls, log, plan.num_ranks)
    run = HostileRun(plan, start, hostile, files, site.thread, log, site.patience_s)
    outcome = run.run()
    ledger = check = None
    if outcome.has_ended_well:
        ledger = read_ledger(files.run_dir, dataset_order(num_prompts, 1))
        check = check_trained_contents(files.run_dir, site.model)
    verdict = certificate_verdict(files.run_dir) if ledger else "not looked at"
    total.add(name, plan, outcome, ledger, check, verdict)
    total.problems += [f"{name}: the key is in {path}" for path in _with_key(files.run_dir, log)]
    if site.stranger.num_requests:
        total.problems.append(f"{name}: {site.stranger.num_requests} requests went elsewhere")
        site.stranger.num_requests = 0


def _with_key(folder: Path, log: Path) -> list[Path]:
    """The files of a run, and its log, that hold the endpoints' key."""
    paths = [log, *(path for path in folder.rglob("*") if path.is_file())]
    small = [path for path in paths if path.stat().st_size < MOST_KEY_BYTES]
    return [path for path in small if KEY.encode() in path.read_bytes()]


def _run_ranks(site: Site, strangers: Sequence[SocketBehaviour], total: Total) -> None:
    """All strangers at all that the ranks of one run listen at; once more, where one met nobody."""
    for number in range(2):
        waiting = [each for each in strangers if total.unmet.get(each.name, True)]
        if waiting:
            plan = plan_ranks(waiting, number, NUM_RANKS, BATCHES_OF_RANKS, site.seed)
            _run(site, plan, total)
    for name, kinds in total.unmet.items():
        total.problems += [f"{name} never met: {kind}" for kind in sorted(kinds)]


def _attempts(
    site: Site, files: RunFiles, urls: Sequence[str], log: Path, num_ranks: int = 1
) -> StartAttempt:
    """Starts attempts of a run on ``urls``."""
    settings = [
        f"run.output_dir={files.run_dir}",
        f"run.seed={site.seed}",
        f"model.path={site.model}",
        f"data.files=[{files.prompts}]",
        f"weight_sync.directory={files.weights}",
        f"inference.endpoints=[{','.join(urls)}]",
        f"trainer.batch_size={BATCH_SIZE}",
        *site.overrides,
    ]

    def start(number: int, resume: bool) -> Attempt:
        # killed before it had taken its folder, it has nothing to resume
        further = ["--resume"] if resume and (files.run_dir / "run.lock").exists() else []
        launched = num_ranks if num_ranks > 1 else 0
        return Attempt(number, CONFIG, [*settings, *further], log, launched)

    return start


def _run_alone(site: Site, total: Total) -> None:
    """Runs without a healthy endpoint: one sentence, and the right status."""
    for alone in runs_alone(min(NUM_ALONE, len(site.hostile))):
        outcome = _one_alone(site, alone)
        total.runs += 1
        total.crashed += outcome is not None
        if outcome is not None:
            total.problems.append(f"nobody healthy, {alone.name}: {outcome}")


def _one_alone(site: Site, alone: Alone) -> str | None:
    name = f"alone-{alone.name}"
    prompts = write_prompts(site.folder / f"{name}.jsonl", BATCH_SIZE * 4, PROMPT_TOKENS)
    (weights := site.weights / name).mkdir()
    files = RunFiles(site.folder / name, weights, prompts)
    hostile = site.hostile[: len(alone.behaviours)]
    for endpoint, behaviour in zip(hostile, alone.behaviours, strict=True):
        endpoint.set_behaviour(behaviour, random.Random(0), may_act=alone.from_start)
        endpoint.elsewhere = site.stranger.url
        endpoint.share = 1.0
        site.thread.run(endpoint.restart(endpoint.model))
    log = site.folder / f"{name}.log"
    start = _attempts(site, files, [endpoint.url for endpoint in hostile], log)
    return alone.watch(start(0, False), files.run_dir, log, hostile, site.patience_s)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("endpoints", "episodes"), default="endpoints")
    parser.add_argument(
        "--runs",
        type=int,
        help=f"default: {NUM_RUNS}, of episodes {DEFAULT_RUNS}; 0: only those without the healthy "
        "endpoints",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="BEHAVIOUR")
    parser.add_argument("--list", action="store_true", help="show the behaviours and stop")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds without progress")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folder")
    parser.add_argument("--set", dest="overrides", nargs="*", default=[], metavar="key=value")
    arguments = parser.parse_args()
    known = EPISODE_BEHAVIOURS if arguments.part == "episodes" else BEHAVIOURS
    if unknown := [name for name in arguments.only or () if name not in known]:
        parser.error(f"--only: {unknown[0]!r} is none of --list")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
