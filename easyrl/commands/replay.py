"""Trains a step again from the journal, without inference: ``easyrl replay RUN_DIR --step N``.

Without a step it lists those that it can train again.

On several devices: ``deepspeed --module easyrl.commands.replay RUN_DIR --step N [key=value …]``.
For debugging a loss, comparing settings, profiling. In strict mode, on as many ranks as the run
had, every metric and every weight is the run's to the bit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from easyrl.arguments.parsing import parsed
from easyrl.arguments.shared import LocalRank, Overrides, RunDir
from easyrl.config.file import load_config
from easyrl.lab.first_difference import relative_difference
from easyrl.ledger.recorded_run import RecordedRun

if TYPE_CHECKING:
    from easyrl.build.replay import Replayed
    from easyrl.config import Config

DIFFERENT, UNUSABLE = 1, 2  # exit statuses


class Row(NamedTuple):
    """A metric of the step, as recorded and as replayed."""

    name: str
    recorded: float
    replayed: float

    @property
    def difference(self) -> float:
        """Of the larger of the two; infinite where one is not finite, 0.0 where both are alike."""
        return relative_difference(self.recorded, self.replayed)


def replay_command(context: typer.Context) -> None:
    """Train a step of RUN_DIR again from its journal, without inference, and compare."""
    raise typer.Exit(main(context.args))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    arguments = parsed(replay_arguments, argv, "easyrl replay", replay_command.__doc__)
    try:
        run = RecordedRun(arguments.run_dir)
        if arguments.step is None:
            print(_replayable(run))
            return 0
        v = replayable_batch(run, arguments.step)
        config = attempt_config(run, run.attempt_of(v), arguments.overrides)
        recorded = run.metrics_of(v)
        from easyrl.build.replay import replay_batch

        replayed = replay_batch(run, v, config)
        reasons = reasons_to_differ(run, config, replayed, arguments.overrides)
    except (ValueError, OSError) as error:  # ConfigError and JournalError among them
        print(f"easyrl: {error}", file=sys.stderr)
        return UNUSABLE
    rows = _compare(recorded, replayed.metrics)
    after = run.weights_before(replayed.last + 1)
    same_weights = None if after is None else replayed.weights[replayed.last + 1] == after
    is_same = same_weights is not False and not any(row.difference for row in rows)
    if replayed.ranks.is_first:
        print(_table(rows))
        print(_account(run, replayed, arguments.overrides))
        print(_verdict(rows, same_weights))
        for line in reasons if is_same else [*reasons, *other_machine(run)]:
            print(f"  {line}")
    return DIFFERENT if not is_same and not reasons else 0


def replayable_batch(run: RecordedRun, step: int) -> int:
    """Of ``step``. Raises ``ValueError``, before a model is loaded, that names those there are."""
    try:
        v = run.batch_of_step(step)
        run.require_journal(run.replay_begins(v), v)
    except ValueError as error:
        raise ValueError(f"{error}; {_replayable(run)}") from error
    return v


def _replayable(run: RecordedRun) -> str:
    """Which steps of ``run`` can be replayed."""
    steps = run.replayable_steps()
    starts = [step for step in steps if step - 1 not in steps]
    ends = [step for step in steps if step + 1 not in steps]
    ranges = [
        str(first) if first == last else f"{first} to {last}"
        for first, last in zip(starts, ends, strict=True)
    ]
    return f"steps that can be replayed: {', '.join(ranges) or 'none'}"


def _compare(recorded: Mapping[str, Any], replayed: Mapping[str, float]) -> list[Row]:
    """The reproducible metrics that both have."""
    from easyrl.runtime.determinism import reproducible

    rows = [
        Row(name, math.nan if recorded[name] is None else float(recorded[name]), value)
        for name, value in reproducible(replayed).items()
        if name in recorded
    ]
    assert rows, "a step without metrics"
    return rows


def _table(rows: Sequence[Row]) -> str:
    width = max(len(row.name) for row in rows)
    lines = [f"{'':{width}}  {'recorded':>16}  {'replayed':>16}  difference"]
    for row in rows:
        difference = f"{row.difference:.1e}" if row.difference else ""
        lines.append(
            f"{row.name:{width}}  {row.recorded:16.9g}  {row.replayed:16.9g}  {difference}".rstrip()
        )
    return "\n".join(lines)


def _account(run: RecordedRun, replayed: Replayed, overrides: Sequence[str]) -> str:
    """What was trained."""
    count = replayed.last - replayed.first + 1
    begun = f"the checkpoint of step {replayed.from_step}" if replayed.from_step else "the start"
    batches = f"{count} batches" if count > 1 else "1 batch"
    text = f"step {run.batch(replayed.last).step}: {batches} trained from {begun}"
    if replayed.weights[replayed.first] != run.batch(replayed.first).weights:
        text += ", which is not what the run went on from: other weights"
    elif overrides and count > 1:
        text += (
            "; the earlier ones too with the settings given here, while the samples are of the "
            "run's policy: set checkpoint.every_steps lower to compare single steps"
        )
    return text


def _verdict(rows: Sequence[Row], same_weights: bool | None) -> str:
    """``same_weights``: that the batch came to; None: the run did not say which."""
    differing = [row for row in rows if row.difference]
    if differing:
        largest = max(differing, key=lambda row: row.difference)
        return (
            f"not equal: {len(differing)} of {len(rows)} metrics; the largest difference is that "
            f"of {largest.name}, {largest.difference:.1e} of its value"
        )
    if same_weights is False:
        return f"{len(rows)} metrics are equal to the bit, the weights behind them are not"
    behind = ", and the weights behind them" if same_weights else ""
    return f"equal to the bit: {len(rows)} metrics{behind}"


def reasons_to_differ(
    run: RecordedRun, config: Config, replayed: Replayed, overrides: Sequence[str]
) -> list[str]:
    """Why the run's bits cannot be expected."""
    reasons = []
    if overrides:
        reasons.append(f"with other settings: {' '.join(overrides)}")
    if config.run.determinism != "strict":  # in strict mode the prompts' order is the run's
        batches = ", ".join(map(str, sorted(replayed.in_prompt_order)))
        reasons.append(
            f"run.determinism=none: the groups of batch {batches} are trained in the order of "
            "their prompts, not in the run's, which was not journalled or cannot be repeated "
            "on other ranks or with another trainer.max_tokens_per_micro_batch"
            if batches
            else "run.determinism=none: groups are trained in the run's order, but nothing keeps "
            "the arithmetic itself the same"
        )
    others = {run.batch(v).num_ranks for v in range(replayed.first, replayed.last + 1)}
    if others != {replayed.ranks.dp_size}:
        ranks = " and ".join(map(str, sorted(others)))
        reasons.append(f"trained on {ranks} ranks, replayed on {replayed.ranks.dp_size}")
    own = run.attempt_of(replayed.last)
    attempts = {run.attempt_of(v) for v in range(replayed.first, replayed.last)} - {own}
    for attempt in sorted(attempts):
        if keys := _differing(attempt_config(run, attempt, overrides), config):
            reasons.append(
                f"its earlier batches are of attempt {attempt}, which had other settings than "
                f"attempt {own}, whose are used here: {', '.join(keys)}"
            )
    return reasons


def attempt_config(run: RecordedRun, attempt: int, overrides: Sequence[str]) -> Config:
    """Of an attempt, with all keys of its recipe."""
    from easyrl.recipes.loading import with_whole_recipe

    return with_whole_recipe(load_config(run.config_file(attempt), overrides, to_look_back=True))


def _differing(one: Config, other: Config) -> list[str]:
    """Keys of what decides how given groups are trained."""
    ours, theirs = one.model_dump(), other.model_dump()
    return [
        f"{section}.{key}"
        for section in ("model", "recipe", "rollout", "scoring", "trainer")
        for key, value in ours[section].items()
        if value != theirs[section].get(key)
    ]


def other_machine(run: RecordedRun) -> list[str]:
    """What a strict run remembers of how it computed, where that is not how this process does."""
    from easyrl.runtime.determinism import ARITHMETIC_FILE
    from easyrl.runtime.numerics import arithmetic

    file = run.folder / ARITHMETIC_FILE
    if not file.is_file() or (then := file.read_text().strip()) == arithmetic():
        return []
    return [f"the run computed with {then}, this is {arithmetic()}: the last bits may differ"]


class _Arguments(NamedTuple):
    """What a replay is started with."""

    run_dir: Path
    overrides: list[str]
    step: int | None


def replay_arguments(
    run_dir: RunDir,
    overrides: Overrides = None,
    step: Annotated[
        int | None,
        typer.Option(help="optimizer step, from 1; default: list those that can be replayed"),
    ] = None,
    local_rank: LocalRank = None,
) -> _Arguments:
    """Declares the command line for typer."""
    return _Arguments(run_dir, overrides or [], step)


if __name__ == "__main__":
    sys.exit(main())
