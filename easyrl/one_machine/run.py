"""``easyrl up``: a run of one file, from the demo's missing model to the last process that ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from easyrl.config import Config, ConfigError, LaunchConfig
from easyrl.config.file import load_config
from easyrl.config.machine import check_paths
from easyrl.demo.prepared import make_parts, missing_parts
from easyrl.hub.models import with_local_models
from easyrl.one_machine.devices import training_devices
from easyrl.runtime.startup_signals import ENDING, say


def run_here(file: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """Starts servers and trainer of ``file`` and waits for the end; the exit status."""
    try:
        config = load_config(file, overrides)
        launch = _launch_of(config, file)
        missing = missing_parts(_named(config))
        if config.model.path not in missing:
            config = with_local_models(config)
        check_paths(config, written_later=missing)
        _say_what_starts(config, launch, missing)
        if missing:
            _make(missing, config.run.seed)
        devices = training_devices(config, launch, _num_devices())
    except (ConfigError, OSError) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        return 2
    arguments = [str(file), *overrides, *(["--resume"] if resume else [])]
    if config.trainer.num_devices == 1:
        return _train_in_this_process(arguments, devices)
    return _train_in_processes(config, arguments, devices)


def _launch_of(config: Config, file: Path) -> LaunchConfig:
    if config.inference.launch is None:
        raise ConfigError(
            f"{file}: inference.launch: is missing, and easyrl up starts the servers itself; add "
            "launch: {engine: embedded}, or start the servers and use easyrl train"
        )
    return config.inference.launch


def _named(config: Config) -> list[Path]:
    """Model and files of prompts."""
    sets = [] if config.evaluation is None else config.evaluation.sets.values()
    held_out = [file for each in sets for file in each.data.files]
    return [config.model.path, *config.data.files, *held_out]


def _say_what_starts(config: Config, launch: LaunchConfig, missing: Sequence[Path]) -> None:
    servers = f"{launch.count} {launch.engine} server{'s' if launch.count > 1 else ''}"
    number = config.trainer.num_devices
    trainer = f"{number} training process{'es' if number > 1 else ''}"
    print(f"easyrl up: {servers}, {trainer}, into {config.run.output_dir}; Ctrl-C ends all")
    if missing:
        listed = ", ".join(map(str, missing))
        print(f"easyrl up: makes the demo's {listed}, which takes about a minute")
    sys.stdout.flush()


def _make(missing: Sequence[Path], seed: int) -> None:
    """The demo's parts; what is half made is removed when a signal ends it."""

    def end(number: int, _: FrameType | None) -> None:
        say(number, "ended it before training began; start it again in the same way")
        sys.exit(128 + number)

    for number in ENDING:
        signal.signal(number, end)
    make_parts(missing, seed)


def _num_devices() -> int:
    """GPUs or NPUs of this machine."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return 0 if accelerator.device_name() == "cpu" else accelerator.device_count()


def _train_in_this_process(arguments: Sequence[str], devices: Sequence[int]) -> int:
    """On the first of ``devices``. Servers get indices of their own."""
    from easyrl.inference_client.servers.managed.launch import visible_devices
    from easyrl.train import main

    if devices:
        os.environ |= visible_devices(devices)
    return main(arguments, prog="easyrl up")


def _train_in_processes(config: Config, arguments: Sequence[str], devices: Sequence[int]) -> int:
    from easyrl.one_machine.launched_trainer import LaunchedTrainer

    number_of_end = 0
    with LaunchedTrainer(
        arguments,
        config.trainer.num_devices,
        grace_s=config.trainer.grace_s,
        devices=devices,
        environment={},
    ) as trainer:

        def end(number: int, _: FrameType | None) -> None:
            nonlocal number_of_end
            number_of_end = number
            trainer.interrupt() if number == signal.SIGINT else trainer.stop()

        for number in ENDING:
            signal.signal(number, end)
        status = trainer.wait()
    return 128 + number_of_end if number_of_end else status
