"""The demo's run: model and prompts made, servers and trainer started, what was learnt measured."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from easyrl.config import Config, ConfigError
from easyrl.config.file import load_config
from easyrl.demo.build_model import build_model
from easyrl.demo.build_teacher import build_teacher
from easyrl.demo.held_out import held_out_accuracy
from easyrl.demo.layouts import NamedLayout, named_layout
from easyrl.demo.servers import SERVER_KEY, Engine, divided_cores, start_server, vllm_python
from easyrl.demo.task import write_splits
from easyrl.inference_client.api_keys import new_api_key
from easyrl.inference_client.servers.managed.server_process import ServerStartError
from easyrl.metrics.trackers import read_metrics
from easyrl.one_machine.launched_trainer import LaunchedTrainer
from easyrl.recipes.loading import load_recipe
from easyrl.runtime.machine import pin_process
from easyrl.runtime.run_files import LOCK_FILE
from easyrl.runtime.run_folder import locked_folder

PROOF_TIMES = ("time/proof_s", "time/canary_s", "time/probe_s")  # of what the endpoints serve
CERTIFICATE_TIMES = ("time/certificate_s", "time/journal_s")
SAMPLES_TIMES = ("time/samples_s",)
TIMELINE_TIMES = ("time/timeline_s",)


def run_demo(arguments: argparse.Namespace) -> int:
    """By the command's ``arguments``; its exit status. SIGTERM ends servers and trainer, too."""
    run_dir: Path = arguments.run_dir
    data = run_dir / "data"
    own = {
        "run.output_dir": run_dir,
        "model.path": run_dir / "base_model",
        "data.files": f"[{data / 'train.jsonl'}]",
        "evaluation.data.files": f"[{data / 'heldout.jsonl'}]",
    }
    overrides = [*(f"{key}={value}" for key, value in own.items())]
    own_keys = (*own, "inference.endpoints", "inference.api_key_env", "checkpoint.export_at_end")
    try:
        if arguments.parallel is not None:
            overrides += named_layout(arguments.parallel).overrides
        overrides += arguments.overrides
        for override in arguments.overrides:
            if override.startswith(tuple(f"{key}=" for key in own_keys)):
                raise ValueError(f"{override}: the demo sets this key itself")
        if arguments.engine == "vllm":
            vllm_python()  # before the minute of the warm start
        config = load_config(arguments.config, overrides)
        teacher = _own_teacher(config, arguments)
        if teacher is not None:
            overrides.append(f"recipe.teacher={teacher}")
    except ValueError as error:  # ConfigError is one
        print(f"easyrl demo: {error}", file=sys.stderr)
        return 2
    disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: servers and trainer end too
    with ExitStack() as held:
        try:
            model, heldout = _set_up(config, run_dir, held)
            if teacher is not None:
                _build_teacher(teacher, config.run.seed)
        except ConfigError as error:
            print(f"easyrl demo: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("easyrl demo: interrupted before training began", file=sys.stderr)
            return 130
        return _measure(config, model, teacher, heldout, overrides, arguments, held)


def _measure(
    config: Config,
    model: Path,
    teacher: Path | None,
    heldout: Path,
    overrides: list[str],
    arguments: argparse.Namespace,
    held: ExitStack,
) -> int:
    """Trains, and says what the model learnt by it."""
    run_dir = config.run.output_dir
    start = time.monotonic()
    num_heldout = len(heldout.read_text().splitlines())
    print(f"measuring the starting model on {num_heldout} held-out problems")
    sampling = {"seed": config.run.seed, "max_tokens": config.rollout.max_tokens}
    before = held_out_accuracy(model, heldout, **sampling)
    print(f"accuracy before: {before:.3f}")
    measured = {"accuracy_before": round(before, 4)}
    if teacher is not None:
        its = held_out_accuracy(teacher, heldout, **sampling)
        print(f"accuracy of the teacher: {its:.3f}")
        measured["accuracy_of_teacher"] = round(its, 4)
    _train(run_dir, model, overrides, arguments, config.trainer.grace_s, held)
    after = held_out_accuracy(run_dir / "model", heldout, **sampling)
    seconds = time.monotonic() - start

    def share(times: Sequence[str]) -> float:
        """Of the whole run, what ``times`` held the trainer up."""
        return round(sum(m.get(key, 0.0) for m in metrics for key in times) / seconds, 4)

    metrics = read_metrics(run_dir / "metrics.jsonl")
    steps = [m for m in metrics if "time/step_s" in m]
    rates = sorted(m["throughput/tokens_per_s_per_device"] for m in steps)
    result = {
        "engine": arguments.engine,
        **measured,
        "accuracy_after": round(after, 4),
        "seconds": round(seconds, 1),
        "steps": len(steps),
        "groups_drawn": int(sum(m["batch/groups_drawn"] for m in steps)),
        "groups_accepted": int(sum(m["batch/groups"] for m in steps)),
        "tokens_per_s_per_device": round(rates[len(rates) // 2], 1),
        "proof_share": share(PROOF_TIMES),
        "certificate_share": share(CERTIFICATE_TIMES),
        "samples_share": share(SAMPLES_TIMES),
        "timeline_share": share(TIMELINE_TIMES),
        "run_dir": str(run_dir),
    }
    accuracies = f"{before:.3f} before, {after:.3f} after {len(steps)} steps"
    print(f"accuracy on held-out problems: {accuracies}")
    print(f"reward curve: {run_dir / 'reward.png'}; model: {run_dir / 'model'}")
    print(json.dumps(result))
    return 0


def _set_up(config: Config, run_dir: Path, held: ExitStack) -> tuple[Path, Path]:
    """A fresh run folder with the problems and the warm-started model, locked by ``held``.

    What an earlier demo has left there is moved beside it. Raises ``ConfigError`` if it holds
    something else, or another process uses it; then it is left as it was.
    """
    if run_dir.exists():
        left = {path.name for path in run_dir.iterdir()} - {LOCK_FILE}
        # one that was interrupted in its warm start has problems, and no model yet
        if left and not (run_dir / "base_model").is_dir() and left != {"data"}:
            raise ConfigError(
                f"{run_dir} holds something else; give another folder: make demo RUN=DIR, or "
                "--run-dir DIR"
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    held.enter_context(locked_folder(run_dir, 0))
    earlier = [path for path in run_dir.iterdir() if path.name != LOCK_FILE]
    if earlier:
        aside = _free_name(run_dir)
        aside.mkdir()
        for path in earlier:
            shutil.move(path, aside)
        print(f"what an earlier demo has left in {run_dir} is now in {aside}")
    _, heldout = write_splits(run_dir / "data", seed=config.run.seed)
    print("warm start: a small Qwen3 sees estimates, careless and careful additions")
    start = time.monotonic()
    model = run_dir / "base_model"
    build_model(model, seed=config.run.seed)
    print(f"warm start took {time.monotonic() - start:.0f} s")
    return model, heldout


def _own_teacher(config: Config, arguments: argparse.Namespace) -> Path | None:
    """Where the demo makes a teacher: none if the recipe needs none, or another one was named."""
    is_named = any(each.startswith("recipe.teacher=") for each in arguments.overrides)
    if load_recipe(config).needs.teacher is None or is_named:
        return None
    run_dir: Path = arguments.run_dir
    return run_dir / "teacher"


def _build_teacher(folder: Path, seed: int) -> None:
    print("teacher: a larger Llama sees careful additions alone")
    start = time.monotonic()
    build_teacher(folder, seed=seed)
    print(f"the teacher took {time.monotonic() - start:.0f} s")


def _free_name(folder: Path) -> Path:
    """``folder`` with the first number behind it that no folder has."""
    numbers = itertools.count(1)
    return next(
        free for n in numbers if not (free := folder.with_name(f"{folder.name}-{n}")).exists()
    )


def _train(
    run_dir: Path,
    model: Path,
    overrides: list[str],
    arguments: argparse.Namespace,
    grace_s: float,
    held: ExitStack,
) -> None:
    """Servers as processes of their own, then the trainer through the ``deepspeed`` launcher.

    It locks the run's folder itself: what is ``held`` of it is given up then.
    """
    engine: Engine = arguments.engine
    layout = named_layout(arguments.parallel) if arguments.parallel else NamedLayout()
    with ExitStack() as servers:
        urls, api_key = [], new_api_key()
        cores = servers.enter_context(divided_cores(engine, run_dir))
        for number in range(arguments.num_servers):
            log = run_dir / f"server-{number}.log"
            try:
                server = start_server(engine, model, cores, api_key, log)
            except (ValueError, ServerStartError) as error:
                sys.exit(f"easyrl demo: {error}")
            urls.append(servers.enter_context(server).url)
        print(f"{arguments.num_servers} {engine} server(s): {', '.join(urls)}")
        command = [
            str(arguments.config),
            *(f"inference.endpoints=[{','.join(urls)}]", f"inference.api_key_env={SERVER_KEY}"),
            *overrides,
        ]
        held.close()
        with LaunchedTrainer(
            command,
            layout.num_processes,
            grace_s=grace_s,
            environment={SERVER_KEY: api_key, **cores.environment},
        ) as trainer:
            if cores.of_trainer is not None:
                pin_process(trainer.process.pid, cores.of_trainer)
            status = trainer.wait()
    if status != 0:
        sys.exit(f"easyrl demo: the trainer ended with status {status}; see above")
