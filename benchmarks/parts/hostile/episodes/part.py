"""``benchmarks.hostile --part episodes``: all runs, and what is said of them."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

import benchmarks.parts.hostile.episodes.environment as environment
from benchmarks.parts.chaos.attempt import Attempt, StartAttempt
from benchmarks.parts.chaos.verdict import certificate_verdict
from benchmarks.parts.hostile.episodes.accounts import (
    EpisodeAccounts,
    compare_with_calm,
    keep_accounts,
)
from benchmarks.parts.hostile.episodes.catalogue import BEHAVIOURS, EpisodeBehaviour
from benchmarks.parts.hostile.episodes.failing_runs import RUNS as FAILING_RUNS
from benchmarks.parts.hostile.episodes.failing_runs import run_failing
from benchmarks.parts.hostile.episodes.plan import (
    NUM_SAMPLES,
    EpisodesPlan,
    plan_episodes,
    plan_prompts,
    write_episode_prompts,
)
from benchmarks.parts.hostile.episodes.run import EpisodesRun
from benchmarks.parts.hostile.run import Outcome
from benchmarks.parts.hostile.verdict import MOST_MB_OVER_CALM, SHOWN
from benchmarks.parts.launched_run import start_servers
from benchmarks.parts.ledger import dataset_order, read_ledger
from benchmarks.parts.random_model import write_random_model
from benchmarks.parts.trained_contents import check_trained_contents

CONFIG = "benchmarks/hostile.yaml"
NUM_SERVERS = 2
BATCH_SIZE, NUM_BATCHES = 8, 5
MAX_MODEL_LEN = 256
MAX_TOKENS, MAX_TURNS = 8, 12
IDLE_TIMEOUT_S = 15.0  # a gateway that says nothing is ended after 10
DEFAULT_RUNS = 4


@dataclass
class EpisodesTotal:
    """Over all runs; each of ``problems`` makes the benchmark fail."""

    happened: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    crashed: int = 0
    prompts_lost: int = 0
    prompts_trained_twice: int = 0
    wrong_content_trained: int = 0
    wrong_without_gradient: int = 0
    resume_failed: int = 0
    calm_mb: float = 0.0
    calm_rewards: dict[tuple[int, int], float] = field(default_factory=dict)
    peak_over_calm_mb: float = 0.0
    problems: list[str] = field(default_factory=list)

    def line(self) -> dict[str, int]:
        """As the part ``endpoints`` ends with."""
        return {
            "behaviours": sum(count > 0 for count in self.happened.values()),
            "runs": self.runs,
            "crashed": self.crashed,
            "prompts_lost": self.prompts_lost,
            "prompts_trained_twice": self.prompts_trained_twice,
            "wrong_content_trained": self.wrong_content_trained,
            "wrong_without_gradient": self.wrong_without_gradient,
            "resume_failed": self.resume_failed,
            "peak_over_calm_mb": round(self.peak_over_calm_mb),
        }

    @property
    def is_good(self) -> bool:
        return not self.problems and self.peak_over_calm_mb <= MOST_MB_OVER_CALM


@dataclass(frozen=True)
class Site:
    """What all runs share."""

    folder: Path
    model: Path
    servers: Sequence[str]  # URLs
    seed: int
    patience_s: float
    overrides: Sequence[str]


def run_episodes(
    folder: Path,
    chosen: Sequence[EpisodeBehaviour],
    num_runs: int,
    seed: int,
    patience_s: float,
    overrides: Sequence[str],
) -> bool:
    """A calm run and ``num_runs`` others; whether all was as it has to be."""
    torch.set_num_threads(1)  # contents of small models are compared beside whole runs
    num_runs = max(1, min(num_runs, len(chosen)))
    print(f"{len(chosen)} behaviours in {num_runs} runs; {folder}")
    total, start_s = EpisodesTotal(), time.monotonic()
    with ExitStack() as opened:
        model = write_random_model(folder / "model", hidden_size=32, num_layers=2, weight_std=0.3)
        options = ["--max-model-len", str(MAX_MODEL_LEN)]
        servers = start_servers("embedded", model, NUM_SERVERS, folder, opened, options)
        urls = [server.url for server in servers]
        site = Site(folder, model, urls, seed, patience_s, overrides)
        _run(site, EpisodesPlan(-1, seed, (), is_calm=True), total)
        if total.problems:
            print("the calm run failed: nothing can be told", file=sys.stderr)
        else:
            for plan in plan_episodes(chosen, num_runs, seed):
                _run(site, plan, total)
            _run_missed(site, chosen, num_runs, total)
            if len(chosen) == len(BEHAVIOURS):
                wrong = run_failing(folder, model, CONFIG, [f"run.seed={seed}", *overrides])
                total.runs += len(FAILING_RUNS)
                total.crashed += len(wrong)
                total.problems += wrong
    for problem in total.problems:
        print(problem)
    print(f"{time.monotonic() - start_s:.0f} s; calm run: {total.calm_mb:.0f} MB")
    print(json.dumps(total.line()))
    return total.is_good


def _run_missed(
    site: Site, chosen: Sequence[EpisodeBehaviour], num_runs: int, total: EpisodesTotal
) -> None:
    """Once more what has not happened: the run may have been killed at its moment."""
    if missed := [each for each in chosen if not total.happened[each.name]]:
        plan = plan_episodes(missed, 1, site.seed + 1)[0]
        _run(site, EpisodesPlan(num_runs, plan.seed, plan.behaviours), total)
    for each in missed:
        if not total.happened[each.name]:
            total.problems.append(f"{each.name} never happened")


def _run(site: Site, plan: EpisodesPlan, total: EpisodesTotal) -> None:
    prompts = plan_prompts(plan, BATCH_SIZE, NUM_BATCHES)
    (said := site.folder / f"{plan.name}-said").mkdir()
    data = write_episode_prompts(site.folder / f"{plan.name}.jsonl", prompts, said, site.seed)
    run_dir, log = site.folder / plan.name, site.folder / f"{plan.name}.log"
    start = _attempts(site, run_dir, data, log)
    outcome = EpisodesRun(plan.name, start, run_dir, log, site.patience_s).run()
    problems = [*outcome.crashed, *outcome.resume_failed]
    total.crashed += len(outcome.crashed)
    total.resume_failed += len(outcome.resume_failed)
    words = ""
    accounts = EpisodeAccounts()
    if outcome.has_ended_well:
        accounts = keep_accounts(run_dir, said, prompts, site.seed)
        words = _judge(site, plan, len(prompts), accounts, total, problems)
    total.happened.update(accounts.happened)
    _count(plan, outcome, total)
    kinds = ", ".join(f"{each.name} {accounts.happened[each.name]}" for each in plan.behaviours)
    print(
        f"{plan.name}: {'BAD' if problems else 'good'}, {outcome.seconds:.0f} s, "
        f"{outcome.peak_mb:.0f} MB, attempts ended {outcome.statuses}; {words}{kinds}"
    )
    for problem in problems:
        print(f"  {problem}")
    total.problems += problems


def _judge(
    site: Site,
    plan: EpisodesPlan,
    num_prompts: int,
    accounts: EpisodeAccounts,
    total: EpisodesTotal,
    problems: list[str],
) -> str:
    """What a finished run's files say; for its line."""
    run_dir = site.folder / plan.name
    if plan.is_calm:
        total.calm_rewards = accounts.first_rewards
    num_as_calm = compare_with_calm(accounts, total.calm_rewards)
    ledger = read_ledger(run_dir, dataset_order(num_prompts, 1))
    check = check_trained_contents(run_dir, site.model)
    verdict = certificate_verdict(run_dir)
    total.prompts_lost += ledger.prompts_lost + ledger.prompts_skipped + len(accounts.lost)
    total.prompts_trained_twice += ledger.prompts_trained_twice
    total.wrong_content_trained += (
        ledger.wrong_version_trained + len(check.wrong_groups) + len(accounts.wrong)
    )
    total.wrong_without_gradient += len(check.wrong_without_gradient)
    for found in (ledger.problems, check.wrong_groups, accounts.lost, accounts.wrong):
        problems += [f"{plan.name}: {what}" for what in found[:SHOWN]]
    problems += [f"{plan.name}: {what}" for what in sorted(set(accounts.problems))[: 4 * SHOWN]]
    if not check.sees_old_weights:
        problems.append(f"{plan.name}: old weights would not show ({check.visible} nats)")
    if verdict != "on-policy":
        total.wrong_content_trained += 1
        problems.append(f"{plan.name}: easyrl verify: {verdict}")
    return (
        f"{accounts.num_turns} turns of {check.num_responses} episodes agree within "
        f"{check.largest:.1e} nats (a batch before: {check.visible or 0:.2f}), "
        f"{num_as_calm} rewards of the first batch are those of the calm run, "
        f"{accounts.num_replaced} groups replaced, "
        f"{accounts.num_bystanders} bystanders of gateways left out; "
    )


def _count(plan: EpisodesPlan, outcome: Outcome, total: EpisodesTotal) -> None:
    if plan.is_calm:
        total.calm_mb = outcome.peak_mb
    else:
        total.runs += 1
        total.peak_over_calm_mb = max(total.peak_over_calm_mb, outcome.peak_mb - total.calm_mb)


def _attempts(site: Site, run_dir: Path, data: Path, log: Path) -> StartAttempt:
    wild = (
        f"{{name: wild, file: {environment.__file__}, num_hosts: 2, max_turns: {MAX_TURNS}, "
        f"idle_timeout_s: {IDLE_TIMEOUT_S}}}"
    )
    settings = [
        f"run.output_dir={run_dir}",
        f"run.seed={site.seed}",
        f"model.path={site.model}",
        f"data.files=[{data}]",
        "data.shuffle=false",  # the first batch has the same prompts as the calm run's
        "data.max_excluded=0.5",
        f"inference.endpoints=[{','.join(site.servers)}]",
        "rewards=[]",
        f"environments=[{wild}]",
        f"rollout.num_generations={NUM_SAMPLES}",
        f"rollout.max_tokens={MAX_TOKENS}",
        f"trainer.batch_size={BATCH_SIZE}",
        "trainer.max_tokens_per_micro_batch=2048",
        *site.overrides,
    ]

    def start(number: int, resume: bool) -> Attempt:
        return Attempt(number, CONFIG, [*settings, *(["--resume"] if resume else [])], log, 0)

    return start


def list_episodes() -> None:
    for each in BEHAVIOURS.values():
        print(f"{each.kind:<9} {each.name:<34} {each.says} ({each.ends})")
