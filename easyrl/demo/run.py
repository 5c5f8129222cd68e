"""The demo's run: model and prompts made, servers and trainer started, what was learnt measured."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from easyrl.config import Config, ConfigError
from easyrl.config.file import load_config
from easyrl.demo.build_model import build_model
from easyrl.demo.build_teacher import build_teacher
from easyrl.demo.folder import fresh_folder
from easyrl.demo.held_out import held_out_accuracy
from easyrl.demo.layouts import NamedLayout, named_layout
from easyrl.demo.servers import Engine, vllm_python
from easyrl.demo.task import write_splits
from easyrl.demo.training import run_figures, started_servers, train
from easyrl.recipes.loading import load_recipe


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
    layout = named_layout(arguments.parallel) if arguments.parallel else NamedLayout()
    engine: Engine = arguments.engine
    with started_servers(engine, arguments.num_servers, model, run_dir) as servers:
        held.close()  # the trainer locks the folder itself
        train(arguments.config, overrides, servers, layout=layout, grace_s=config.trainer.grace_s)
    after = held_out_accuracy(run_dir / "model", heldout, **sampling)
    seconds = time.monotonic() - start

    result = {
        "engine": arguments.engine,
        **measured,
        "accuracy_after": round(after, 4),
        "seconds": round(seconds, 1),
        **run_figures(run_dir, seconds),
    }
    accuracies = f"{before:.3f} before, {after:.3f} after {result['steps']} steps"
    print(f"accuracy on held-out problems: {accuracies}")
    print(f"reward curve: {run_dir / 'reward.png'}; model: {run_dir / 'model'}")
    print(json.dumps(result))
    return 0


def _set_up(config: Config, run_dir: Path, held: ExitStack) -> tuple[Path, Path]:
    """A fresh run folder with the problems and the warm-started model, locked by ``held``.

    What an earlier demo has left there is moved beside it. Raises ``ConfigError`` if it holds
    something else, or another process uses it; then it is left as it was.
    """
    fresh_folder(run_dir, held)
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
