"""What a run is going to do in numbers: records, batches, epochs, steps, tokens."""

from __future__ import annotations

import sys

from easyrl.config import Config
from easyrl.schema import Progress


def tell_run(config: Config, num_records: int, num_steps: int | None, progress: Progress) -> None:
    """Prints ``describe_run``."""
    for line in describe_run(config, num_records, num_steps, progress):
        print(f"easyrl: {line}", file=sys.stderr, flush=True)


def describe_run(
    config: Config, num_records: int, num_steps: int | None, progress: Progress
) -> list[str]:
    """Lines for a person, before the first step.

    Args:
        num_records: of an epoch.
        num_steps: of the whole run; None: nobody knows, the recipe rejects groups.
    """
    trainer, is_rollouts = config.trainer, config.source == "rollouts"
    what = "prompts" if is_rollouts else "records"
    batch = f"{trainer.batch_size:,} {what}"
    if is_rollouts:
        rollout = config.rollout
        responses = trainer.batch_size * rollout.num_generations
        batch += f" x {rollout.num_generations} responses"
        batch += f", at most {responses * rollout.max_tokens:,} response tokens"
    if trainer.updates_per_batch > 1:
        batch += f", {trainer.updates_per_batch} steps"
    lines = [
        f"{num_records:,} {what}; a batch has {batch}",
        _length(config, num_records, num_steps, progress.position, what),
    ]
    if progress.step:
        lines.append(f"{progress.step:,} steps are done")
    return lines


def _length(
    config: Config, num_records: int, num_steps: int | None, position: int, what: str
) -> str:
    """``position``: records that were drawn before."""
    trainer = config.trainer
    if trainer.max_steps is not None:
        batches = trainer.max_steps // trainer.updates_per_batch
        epochs = batches * trainer.batch_size / num_records
        return f"{_steps(trainer.max_steps)} (trainer.max_steps), {epochs:.3g} epochs"
    epochs = config.data.epochs
    passes = f"{epochs} epoch{'s' * (epochs > 1)} (data.epochs)"
    if num_steps is None:
        return f"{passes}; how many steps depends on how many groups the recipe accepts"
    last = (num_records * epochs - position) % trainer.batch_size
    ends = f"; the last batch has {last:,} {what} only" if last else ""
    return f"{passes}, {_steps(num_steps)}{ends}"


def _steps(number: int) -> str:
    return f"{number:,} step{'s' * (number != 1)}"
