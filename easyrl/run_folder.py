"""The run's folder: resolved configuration, life count, event log, metrics."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path

from easyrl.agreement import Agreement
from easyrl.config import Config, ConfigError, dump_config
from easyrl.console import ConsoleView
from easyrl.event_log import EventLog, Record, ignore
from easyrl.metrics import JsonlTracker, TensorBoardTracker, Tracker, WandbTracker

METRICS_FILE = "metrics.jsonl"


def refuse_earlier_run(config: Config) -> None:
    """Raises ``ConfigError`` if the folder holds a run; called where it is not to be resumed."""
    output = config.run.output_dir
    if (output / METRICS_FILE).exists():
        raise ConfigError(
            f"run.output_dir: {output} holds an earlier run; add --resume to go on with it, or "
            "name another folder"
        )


def run_identity(config: Config) -> str:
    """Name and a hash of the folder: runs of one name share neither versions nor files."""
    folder = str(config.run.output_dir.resolve()).encode()
    return f"{config.run.name}-{hashlib.blake2b(folder, digest_size=4).hexdigest()}"


def prepare_output(config: Config, agreement: Agreement) -> Path:
    """The folder, with the configuration as resolved. Collective."""
    output = config.run.output_dir
    if agreement.rank == 0:
        output.mkdir(parents=True, exist_ok=True)
        (output / "config.yaml").write_text(dump_config(config))
    agreement.exchange(None)  # nobody writes before the folder is there
    return output


def next_attempt(output: Path, agreement: Agreement) -> int:
    """How often the run was started; part of the policy version, so that no two lives share one."""
    file = output / "attempt.json"
    attempt = 0
    if agreement.rank == 0:
        attempt = json.loads(file.read_text()) + 1 if file.exists() else 0
        file.write_text(json.dumps(attempt))
    return agreement.from_rank_zero(attempt)


def open_event_log(config: Config, output: Path, agreement: Agreement, opened: ExitStack) -> Record:
    """Where this rank's events go."""
    if not config.run.event_log:
        return ignore
    log = EventLog(output / f"events-rank{agreement.rank}.jsonl")
    opened.callback(log.close)
    return log.record


def open_trackers(config: Config, output: Path, from_step: int, total_steps: int) -> list[Tracker]:
    """All back ends that the configuration names; their figures go on after ``from_step``."""
    trackers: list[Tracker] = [JsonlTracker(output / METRICS_FILE, from_step)]
    if "tensorboard" in config.run.trackers:
        trackers.append(TensorBoardTracker(output / "tensorboard", from_step))
    if "wandb" in config.run.trackers:
        plain = config.model_dump(mode="json")
        trackers.append(WandbTracker(config.run.wandb_project, config.run.name, output, plain))
    if config.run.console:
        trackers.append(ConsoleView(total_steps))
    return trackers
