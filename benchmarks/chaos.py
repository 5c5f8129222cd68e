"""A run whose trainer and endpoints are killed at random moments, against one that nobody disturbs.

``python -m benchmarks.chaos [--kills 200] [--batches 100] [--seed 0] [--reject 0.3] [--updates 2]
[--parallel tp2pp2]``

Real runs of two data-parallel ranks through the ``deepspeed`` launcher, in strict mode, against two
embedded servers, all proofs on. After each hit the trainer is started again with ``--resume``.
In the end, weights and reproducible metrics have to be those of the undisturbed run to the bit, and
``easyrl verify`` and the event log have to say that every prompt was trained exactly once, or, with
``--reject``, rejected; the order of the prompts then goes through as many epochs as it takes.
With ``--parallel tp2pp2`` the model is split over the ranks, of which one is killed at a time.
The last line printed is one JSON object; the exit status is 0 if all that held.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from transformers.utils.logging import disable_progress_bar

from benchmarks.parts.chaos.attempt import Attempt, StartAttempt
from benchmarks.parts.chaos.plan import plan_strikes
from benchmarks.parts.chaos.run import AttemptFailed, ChaosRun, Hit, Pace
from benchmarks.parts.chaos.verdict import SHOWN, certificate_verdict, compare_runs
from benchmarks.parts.launched_run import start_servers
from benchmarks.parts.ledger import Key, Ledger, dataset_order, read_ledger
from benchmarks.parts.random_model import write_prompts, write_random_model
from benchmarks.parts.run_phase import PHASES
from benchmarks.parts.run_watch import RunStuck
from benchmarks.parts.scratch import scratch
from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.demo.layouts import NamedLayout, named_layout
from easyrl.inference_client.servers.managed.server_process import ServerProcess
from easyrl.metrics.event_log import read_events
from easyrl.schema import Prompt

CONFIG = "benchmarks/chaos.yaml"
NUM_SERVERS = 2
BATCH_SIZE, EPOCHS = 8, 2
PROMPT_TOKENS, MAX_MODEL_LEN = 12, 64


def main() -> int:
    arguments = _parse()
    disable_progress_bar()
    good = False
    with scratch("chaos", keep=True) as made:
        print(f"{arguments.kills} kills over {arguments.batches} batches; {made.folder}")
        try:
            good = _compare(arguments, made.folder)
        except (AttemptFailed, RunStuck) as error:
            print(error, file=sys.stderr)
        made.keep = arguments.keep or not good
    return 0 if good else 1


def _compare(arguments: argparse.Namespace, folder: Path) -> bool:
    """Both runs, and what is to be said of them."""
    num_prompts = arguments.batches * BATCH_SIZE // EPOCHS
    layout = named_layout(arguments.parallel)
    model = write_random_model(folder / "model", hidden_size=256, num_layers=4)
    prompts = write_prompts(folder / "prompts.jsonl", num_prompts, PROMPT_TOKENS)
    start_s = time.monotonic()
    with ExitStack() as opened:
        options = ["--batch-invariant", "--max-model-len", str(MAX_MODEL_LEN)]
        servers = start_servers("embedded", model, NUM_SERVERS, folder, opened, options)
        overrides = [
            f"run.seed={arguments.seed}",
            f"model.path={model}",
            f"data.files=[{prompts}]",
            f"data.epochs={EPOCHS}",
            f"inference.endpoints=[{','.join(server.url for server in servers)}]",
            f"trainer.batch_size={BATCH_SIZE}",
            *_recipe(arguments),
            *layout.overrides,
            *arguments.overrides,
        ]
        undisturbed = _attempts(folder / "undisturbed", overrides, layout)
        pace = _run_undisturbed(undisturbed, servers, folder)
        print(f"undisturbed: {pace.start_s:.1f} s to the first batch, {pace.batch_s:.2f} s each")
        strikes = plan_strikes(arguments.kills, arguments.batches, arguments.seed)
        chaos = ChaosRun(
            _attempts(folder / "disturbed", overrides, layout),
            servers,
            folder / "disturbed",
            folder / "disturbed.log",
            strikes,
            pace,
            arguments.patience,
        )
        try:
            chaos.run()
        finally:
            _show(chaos.hits)
    compared = compare_runs(folder / "undisturbed", folder / "disturbed")
    ledger = read_ledger(folder / "disturbed", _expected(arguments, folder, num_prompts))
    for problem in [*compared.differences[:SHOWN], *ledger.problems[:SHOWN]]:
        print(problem)
    result = {
        **_counts(chaos.hits, ledger),
        "certificate": certificate_verdict(folder / "disturbed"),
        "bit_equal_to_undisturbed": compared.is_equal,
        "metrics_compared": compared.num_metrics,
        "weights": compared.weights[:16],
        "attempts": chaos.num_attempts,
        "seconds": round(time.monotonic() - start_s, 1),
    }
    print(json.dumps(result))
    return (
        compared.is_equal
        and result["certificate"] == "on-policy"
        and ledger.is_clean
        and result["kills"] == arguments.kills
        and ledger.batches == arguments.batches * arguments.updates
    )


def _recipe(arguments: argparse.Namespace) -> list[str]:
    """Settings of ``--reject`` and ``--updates``."""
    settings = [f"trainer.updates_per_batch={arguments.updates}"]
    if arguments.reject:
        settings += [
            "recipe.file=benchmarks/rejecting_recipe.py",
            "recipe.name=Rejecting",
            f"recipe.reject={arguments.reject}",
            f"trainer.max_steps={arguments.batches * arguments.updates}",
        ]
    return settings


def _expected(arguments: argparse.Namespace, folder: Path, num_prompts: int) -> set[Key]:
    """Every prompt that has to be trained or rejected, once; by the undisturbed run's cursor."""
    if not arguments.reject:
        return dataset_order(num_prompts, EPOCHS)
    nothing = np.zeros(0, np.int32)
    prompts = [Prompt(index, nothing, "", None) for index in range(num_prompts)]
    order = PromptOrder(prompts, seed=arguments.seed, shuffle=True, epochs=None)
    cursor = read_ledger(folder / "undisturbed", set()).cursor
    return {order.prompt(position).key for position in range(cursor)}


def _attempts(run_dir: Path, overrides: Sequence[str], layout: NamedLayout) -> StartAttempt:
    log = run_dir.with_suffix(".log")
    settings = [f"run.output_dir={run_dir}", *overrides]

    def start(number: int, resume: bool) -> Attempt:
        further = ["--resume"] if resume else []
        return Attempt(number, CONFIG, [*settings, *further], log, layout.num_processes)

    return start


def _run_undisturbed(
    start_attempt: StartAttempt, servers: Sequence[ServerProcess], folder: Path
) -> Pace:
    """The run that the other is held against."""
    run_dir, log = folder / "undisturbed", folder / "undisturbed.log"
    began_s = time.monotonic()
    run = ChaosRun(start_attempt, servers, run_dir, log, [], Pace(0.0, 0.0), patience_s=120.0)
    run.run()
    events = read_events(run_dir / "events-rank0.jsonl")
    dispatched = [e["t"] for e in events if e["event"] == "batch_dispatched"]
    steps = [e["t"] for e in events if e["event"] == "step"]
    return Pace(dispatched[0] - began_s, (steps[-1] - dispatched[0]) / len(steps))


def _counts(hits: Sequence[Hit], ledger: Ledger) -> dict[str, object]:
    """The head of the last line, and what was hit how."""
    at_trainer = [hit for hit in hits if hit.strike.hits_trainer]
    return {
        "kills": len(hits),
        "batches": ledger.batches,
        "groups_lost": ledger.prompts_lost,
        "groups_trained_twice": ledger.prompts_trained_twice,
        "groups_rejected": ledger.prompts_rejected,
        "wrong_version_trained": ledger.wrong_version_trained,
        "trainer_kills": len(at_trainer),
        "endpoint_kills": len(hits) - len(at_trainer),
        "sigkill": sum(hit.strike.how.endswith("killed") for hit in hits),
        "sigterm": sum(hit.strike.how.endswith("ended") for hit in hits),
        "saved_on_sigterm": sum(hit.saved for hit in at_trainer),
    }


def _show(hits: Sequence[Hit]) -> None:
    """What was hit in which phase of the run, and how a hit attempt ended."""
    found = Counter((hit.strike.how, hit.phase) for hit in hits)
    hows = sorted({hit.strike.how for hit in hits})
    print(f"{'':<16}" + "".join(f"{phase:>12}" for phase in PHASES) + f"{'all':>6}")
    for how in hows:
        counts = [found[how, phase] for phase in PHASES]
        print(f"{how:<16}" + "".join(f"{count:>12}" for count in counts) + f"{sum(counts):>6}")
    totals = [sum(found[how, phase] for how in hows) for phase in PHASES]
    print(f"{'all':<16}" + "".join(f"{count:>12}" for count in totals) + f"{sum(totals):>6}")
    print(f"while a checkpoint was written: {sum(hit.writes_checkpoint for hit in hits)}")
    for how in hows:
        ended = [hit for hit in hits if hit.strike.how == how and hit.end_s is not None]
        if ended:
            slowest_s = max(hit.end_s or 0.0 for hit in ended)
            statuses = dict(Counter(hit.status for hit in ended))
            print(f"{how}: ended with {statuses} within {slowest_s:.1f} s")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reject", type=float, default=0.0, help="share of the groups")
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps on each batch")
    parser.add_argument("--parallel", default="dp2", metavar="LAYOUT", help="of the trainer")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds without progress")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folder")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.exit(main())
