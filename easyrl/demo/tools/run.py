"""The run of the demo with a tool: trained, and trained again with shuffled rewards, the control.

What the model gets right is counted by the runs themselves, which play the held-out problems as
they play those of the training (``evaluation``).
"""

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
from easyrl.demo.folder import fresh_folder
from easyrl.demo.layouts import NamedLayout, named_layout
from easyrl.demo.servers import Engine, vllm_python
from easyrl.demo.tools.build_model import build_model
from easyrl.demo.tools.task import write_splits
from easyrl.demo.training import run_figures, started_servers, train
from easyrl.metrics.trackers import read_metrics

ACCURACY = "eval/accuracy"
CONTROL = "shuffled"  # its folder, inside the run's


def run_tools_demo(arguments: argparse.Namespace) -> int:
    """By the command's ``arguments``; its exit status. SIGTERM ends servers and trainer, too."""
    run_dir: Path = arguments.run_dir
    data = run_dir / "data"
    own = {
        "run.output_dir": run_dir,
        "model.path": run_dir / "base_model",
        "data.files": f"[{data / 'train.jsonl'}]",
        "evaluation.data.files": f"[{data / 'heldout.jsonl'}]",
    }
    own_keys = (*own, "inference.endpoints", "inference.api_key_env", "scoring.shuffle_rewards")
    layout = NamedLayout()
    try:
        if arguments.parallel is not None:
            layout = named_layout(arguments.parallel)
        for override in arguments.overrides:
            if override.startswith(tuple(f"{key}=" for key in own_keys)):
                raise ValueError(f"{override}: the demo sets this key itself")
        if arguments.engine == "vllm":
            vllm_python()  # before the warm start
        overrides = [f"{key}={value}" for key, value in own.items()]
        overrides += [*layout.overrides, *arguments.overrides]
        config = load_config(arguments.config, overrides)
        _check_measures(config, arguments.config)
    except ValueError as error:  # ConfigError is one
        print(f"easyrl demo: {error}", file=sys.stderr)
        return 2
    disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: servers and trainer end too
    with ExitStack() as held:
        try:
            fresh_folder(run_dir, held)
            write_splits(data, seed=config.run.seed)
            warm_start_s = _warm_start(config.model.path, config.run.seed)
        except ConfigError as error:
            print(f"easyrl demo: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("easyrl demo: interrupted before training began", file=sys.stderr)
            return 130
        result = _trained_twice(config, overrides, layout, arguments, held)
    print(json.dumps({**result, "warm_start_s": round(warm_start_s, 1)}))
    return 0


def _check_measures(config: Config, file: Path) -> None:
    """Raises ``ConfigError`` if the run would not say what the model gets right."""
    evaluation = config.evaluation
    if evaluation is None or evaluation.data is None:
        raise ConfigError(f"{file}: evaluation.data: the demo measures with it; add it")
    if not (evaluation.at_start and evaluation.at_end):
        raise ConfigError("evaluation: the demo measures at start and end; remove at_start, at_end")


def _warm_start(model: Path | str, seed: int) -> float:
    """Builds the model; the seconds that it took."""
    print("warm start: a small Qwen3 sees products estimated, and tools called wrongly and right")
    start = time.monotonic()
    build_model(Path(model), seed=seed)
    seconds = time.monotonic() - start
    print(f"warm start took {seconds:.0f} s")
    return seconds


def _trained_twice(
    config: Config,
    overrides: list[str],
    layout: NamedLayout,
    arguments: argparse.Namespace,
    held: ExitStack,
) -> dict[str, object]:
    """The last line's figures. Both runs have the same servers, each brings its weights there."""
    run_dir, engine = config.run.output_dir, _engine(arguments)
    control_dir = run_dir / CONTROL
    control = [f"run.output_dir={control_dir}", "scoring.shuffle_rewards=true"]
    start = time.monotonic()
    with started_servers(
        engine, arguments.num_servers, Path(config.model.path), run_dir
    ) as servers:
        held.close()  # the trainer locks the folder itself
        grace_s = config.trainer.grace_s
        train(arguments.config, overrides, servers, layout=layout, grace_s=grace_s)
        trained_s = time.monotonic() - start
        print("the control: the rewards of each group are shuffled among its episodes")
        train(arguments.config, [*overrides, *control], servers, layout=layout, grace_s=grace_s)
    seconds = time.monotonic() - start
    before, after = _accuracies(run_dir)
    _, shuffled = _accuracies(control_dir)
    figures = run_figures(run_dir, trained_s)
    num_steps = figures["steps"]
    accuracies = f"{before:.3f} before, {after:.3f} after {num_steps} steps"
    print(f"accuracy on held-out problems: {accuracies}, {shuffled:.3f} with shuffled rewards")
    print(f"reward curve: {run_dir / 'reward.png'}; model: {run_dir / 'model'}")
    return {
        "engine": engine,
        "accuracy_before": round(before, 4),
        "accuracy_after": round(after, 4),
        "accuracy_shuffled": round(shuffled, 4),
        "seconds": round(seconds, 1),
        **figures,
    }


def _engine(arguments: argparse.Namespace) -> Engine:
    engine: Engine = arguments.engine
    return engine


def _accuracies(run_dir: Path) -> tuple[float, float]:
    """On the held-out problems, before the first step and behind the last."""
    measured = [m[ACCURACY] for m in read_metrics(run_dir / "metrics.jsonl") if ACCURACY in m]
    return measured[0], measured[-1]
