"""A training run whose inference servers are killed, stopped and restarted at random.

``python -m benchmarks.faults [--batches 200] [--engine vllm|embedded] [--seed 0]``

A real run (DeepSpeed through its launcher, all proofs on) against two real servers. With
``--engine vllm`` the environment variable EASYRL_VLLM_PYTHON names the interpreter of vLLM's
environment. Afterwards the run's own event log has to show that every prompt was trained exactly
once in each epoch, by samples of its batch's version only. The last line printed is one JSON
object; the exit status is 0 if all that held and the run was never stuck.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from benchmarks.parts.fault_injection import Fault, FaultInjector, Schedule
from benchmarks.parts.launched_run import start_servers, start_trainer
from benchmarks.parts.ledger import Ledger, dataset_order, read_ledger
from benchmarks.parts.random_model import write_prompts, write_random_model
from benchmarks.parts.run_watch import RunStuck, RunWatch
from benchmarks.parts.scratch import scratch
from easyrl.inference_client.servers.managed.server_process import ServerProcess
from easyrl.metrics.event_log import read_events

CONFIG = "benchmarks/faults.yaml"
NUM_SERVERS = 2
BATCH_SIZE = 8
EPOCHS = 2
PROMPT_TOKENS = 12
MAX_MODEL_LEN = 256
LOOK_INTERVAL_S = 0.5
END_TIMEOUT_S = 60.0
SCHEDULES = {
    "embedded": Schedule(calm_s=(2.0, 8.0)),
    # a restart takes 20 to 60 s on two cores: more kills would leave nobody to train with
    "vllm": Schedule(calm_s=(4.0, 16.0), kill_share=0.3),
}


@dataclass(frozen=True)
class Outcome:
    """What was seen from outside."""

    status: int  # of the trainer
    seconds: float  # from the first batch to the end
    longest_pause_s: float  # in which the run did nothing
    faults: list[Fault]


def main() -> int:
    arguments = _parse()
    disable_progress_bar()
    with scratch("faults", keep=True) as made:
        folder = made.folder
        print(f"{arguments.batches} batches of {BATCH_SIZE} prompts, {arguments.engine}; {folder}")
        model = write_random_model(folder / "model", hidden_size=32, num_layers=2)
        num_prompts = arguments.batches * BATCH_SIZE // EPOCHS
        prompts = write_prompts(folder / "prompts.jsonl", num_prompts, PROMPT_TOKENS)
        outcome = _run(arguments, folder, model, prompts)
        ledger = read_ledger(folder / "run", dataset_order(num_prompts, EPOCHS))
        used_again = _used_again(folder / "run", outcome.faults)
        result = _report(outcome, ledger, used_again)
        good = outcome.status == 0 and ledger.is_clean and ledger.batches == arguments.batches
        if not good:
            print((folder / "trainer.log").read_text(errors="replace")[-5000:], file=sys.stderr)
        made.keep = arguments.keep or not good
        print(json.dumps(result))
        return 0 if good else 1


def _run(arguments: argparse.Namespace, folder: Path, model: Path, prompts: Path) -> Outcome:
    """The run, under fault from its first batch on."""
    log = folder / "trainer.log"
    with ExitStack() as opened:
        options = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "64"]
        servers = start_servers(arguments.engine, model, NUM_SERVERS, folder, opened, options)
        overrides = _overrides(arguments, folder, model, prompts, servers)
        trainer = start_trainer(CONFIG, overrides, log)
        opened.callback(_end, trainer)
        watch = RunWatch(folder / "run", log, arguments.patience)
        injector = FaultInjector(servers, arguments.seed, SCHEDULES[arguments.engine])
        first_s = time.monotonic()
        try:
            while trainer.poll() is None:
                time.sleep(LOOK_INTERVAL_S)
                watch.look()
                if watch.num_batches and not injector.ident:
                    first_s = time.monotonic()
                    injector.start()
                if injector.error is not None:
                    raise injector.error
                _show(watch, arguments.batches)
        except RunStuck as stuck:
            print(watch.dump(trainer), file=sys.stderr)
            sys.exit(f"the run is stuck: {stuck}")
        finally:
            if injector.ident:
                injector.end()
        if not watch.num_batches:
            sys.exit(f"the trainer ended with status {trainer.returncode} before its first batch")
        seconds = time.monotonic() - first_s
        return Outcome(trainer.returncode, seconds, watch.longest_pause_s, injector.faults)


def _overrides(
    arguments: argparse.Namespace,
    folder: Path,
    model: Path,
    prompts: Path,
    servers: Sequence[ServerProcess],
) -> list[str]:
    return [
        f"run.output_dir={folder / 'run'}",
        f"run.seed={arguments.seed}",
        f"model.path={model}",
        f"data.files=[{prompts}]",
        f"data.epochs={EPOCHS}",
        f"inference.endpoints=[{','.join(server.url for server in servers)}]",
        f"trainer.batch_size={BATCH_SIZE}",
        *arguments.overrides,
    ]


def _end(trainer: subprocess.Popen[bytes]) -> None:
    if trainer.poll() is not None:
        return
    trainer.terminate()
    try:
        trainer.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()


def _show(watch: RunWatch, num_batches: int) -> None:
    if sys.stdout.isatty():
        print(f"\rbatch {watch.num_steps} of {num_batches} ", end="", flush=True)


def _used_again(run_dir: Path, faults: Sequence[Fault]) -> list[float | None]:
    """Seconds from each fault to the first response that its endpoint gave after its return."""
    served = [e for e in read_events(run_dir / "events-rank0.jsonl") if "endpoint" in e]
    responses = [(e["t"], e["endpoint"]) for e in served if e["event"] == "response_scored"]

    def after(fault: Fault) -> float | None:
        if fault.returned_s is None:
            return None
        since = fault.returned_s
        first = next((t for t, url in responses if url == fault.url and t > since), None)
        return None if first is None else first - fault.at_s

    return [after(fault) for fault in faults]


def _report(
    outcome: Outcome, ledger: Ledger, used_again: Sequence[float | None]
) -> dict[str, object]:
    """Prints the table of faults; the figures of the last line."""
    start_s = outcome.faults[0].at_s if outcome.faults else 0.0
    print("     at s  what          endpoint                  back after s  used again after s")
    for fault, again in zip(outcome.faults, used_again, strict=True):
        what = f"{fault.kind}{' of all' if fault.both else ''}"
        back = None if fault.answered_s is None else fault.answered_s - fault.at_s
        print(
            f"{fault.at_s - start_s:9.1f}  {what:<12}  {fault.url:<24}  "
            f"{_seconds(back):>12}  {_seconds(again):>18}"
        )
    for problem in ledger.problems[:20]:
        print(f"ledger: {problem}")
    kinds = [fault.kind for fault in outcome.faults]
    return {
        "batches": ledger.batches,
        "faults": len(outcome.faults),
        "prompts_lost": ledger.prompts_lost,
        "prompts_trained_twice": ledger.prompts_trained_twice,
        "wrong_version_trained": ledger.wrong_version_trained,
        "prompts_excluded": ledger.prompts_excluded,
        "prompts_rejected": ledger.prompts_rejected,
        "kills": kinds.count("kill"),
        "stops": kinds.count("stop"),
        "none_left": sum(_leaves_none(fault, outcome.faults) for fault in outcome.faults),
        "repairs": sum(again is not None for again in used_again),
        "longest_pause_s": round(outcome.longest_pause_s, 1),
        "seconds": round(outcome.seconds, 1),
        "trainer_status": outcome.status,
    }


def _leaves_none(fault: Fault, faults: Sequence[Fault]) -> bool:
    """Whether every other server was gone as well when ``fault`` hit."""
    gone = {
        other.url
        for other in faults
        if other.at_s <= fault.at_s < (other.answered_s or float("inf"))
    }
    return len(gone) == NUM_SERVERS


def _seconds(value: float | None) -> str:
    return "not before the end" if value is None else f"{value:.1f}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=600.0, help="seconds without progress")
    parser.add_argument("--keep", action="store_true", help="keep the run's folder")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.exit(main())
