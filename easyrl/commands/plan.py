"""``easyrl plan RUN_DIR``: a run's batch simulated with other numbers of everything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from easyrl.arguments.shared import AsJson, RunDir
from easyrl.runtime.run_files import CONFIG_FILE, file_of_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from easyrl.config import Config
    from easyrl.simulation.calibrate import Calibration
    from easyrl.simulation.split import Split

ROWS = 8


def plan_command(
    run_dir: RunDir,
    endpoints: Annotated[int | None, typer.Option(help="inference endpoints", min=1)] = None,
    places: Annotated[int | None, typer.Option(help="requests in flight at each", min=1)] = None,
    ranks: Annotated[int | None, typer.Option(help="data-parallel ranks", min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(help="prompts of a batch", min=1)] = None,
    group_size: Annotated[int | None, typer.Option(help="responses of a prompt", min=1)] = None,
    mode: Annotated[str | None, typer.Option(help="async or sync")] = None,
    mean_tokens: Annotated[
        float | None, typer.Option(help="of responses, log-normal; default: the run's lengths")
    ] = None,
    sigma: Annotated[float, typer.Option(help="of the logarithm of their lengths", min=0)] = 0.5,
    devices: Annotated[
        int | None, typer.Option(help="divide so many between inference and training", min=2)
    ] = None,
    devices_per_endpoint: Annotated[
        int, typer.Option(help="devices of an inference endpoint", min=1)
    ] = 1,
    devices_per_rank: Annotated[int, typer.Option(help="devices of a training rank", min=1)] = 1,
    png: Annotated[Path | None, typer.Option(help="draw the divisions into this file")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a run's batch with other endpoints, ranks, sizes, lengths or shares of devices."""
    from dataclasses import asdict, replace

    from easyrl.config import ConfigError
    from easyrl.simulation.setting import Lengths
    from easyrl.simulation.split import Split, splits_of

    try:
        config, calibration = _calibrated(run_dir, devices_per_endpoint, devices_per_rank)
        measured = calibration.setting
        asked: dict[str, Any] = {
            "endpoints": endpoints,
            "places": places,
            "ranks": ranks,
            "batch_size": batch_size,
            "group_size": group_size,
            "mode": mode,
        }
        if mode not in (None, "async", "sync"):
            raise ValueError(f"--mode: is {mode!r}; async or sync")
        wanted = replace(measured, **{k: v for k, v in asked.items() if v is not None})
        if mean_tokens is not None:
            longest = config.rollout.max_tokens
            wanted = replace(wanted, lengths=Lengths((), mean_tokens, sigma, longest))
        rows: list[Split]
        if devices is not None:
            rows = splits_of(devices, wanted, fits=lambda ranks: _fits(config, ranks))
        else:
            from easyrl.simulation.pipeline import simulate

            settings = [measured] if wanted == measured else [measured, wanted]
            rows = [Split(s, simulate(s), _fits(config, s.ranks)) for s in settings]
        if png is not None:
            from easyrl.simulation.draw import draw_splits

            draw_splits(rows, png)
    except (ConfigError, ValueError, OSError) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        import json

        told = [
            _without_lengths(asdict(row.setting))
            | asdict(row.outcome)
            | {
                "tokens_per_s_per_device": row.outcome.tokens_per_s_per_device(row.setting),
                "fits": row.fits,
            }
            for row in rows
        ]
        print(json.dumps({"measured_step_s": calibration.step_s, "rows": told}))
        return
    _print(rows, calibration)


def _calibrated(
    run_dir: Path, devices_per_endpoint: int, devices_per_rank: int
) -> tuple[Config, Calibration]:
    from easyrl.config.file import load_config
    from easyrl.simulation.calibrate import calibrate, most_in_flight
    from easyrl.timeline.reading import kept_batches, read_batch

    config = load_config(file_of_run(run_dir, CONFIG_FILE), to_look_back=True)
    if config.source != "rollouts":
        raise ValueError(f"{run_dir}: is a run on records; no endpoint is part of it")
    numbers = kept_batches(run_dir)
    batches = [read_batch(run_dir, number) for number in numbers[1:-1] or numbers]
    batches = [of_ranks for of_ranks in batches if of_ranks]
    if not batches:
        raise ValueError(f"{run_dir}: has no timeline to calibrate on (timeline.keep)")
    places = config.inference.max_inflight
    calibration = calibrate(
        batches,
        # the limit of auto follows what is measured
        places=most_in_flight(batches) if places == "auto" else int(places),
        batch_size=config.trainer.batch_size,
        group_size=config.rollout.num_generations,
        mode=config.run.mode,
        devices_per_endpoint=devices_per_endpoint,
        devices_per_rank=devices_per_rank,
    )
    return config, calibration


def _fits(config: Config, ranks: int) -> bool | None:
    """Whether ``ranks`` have the memory on this machine's devices; None where nobody can say."""
    from easyrl.config import ConfigError
    from easyrl.memory_plan.plan import plan_memory
    from easyrl.memory_plan.verdict import device_bytes

    try:
        available = device_bytes()
        plan = plan_memory(config, ranks * config.parallel.ranks_per_model)
    except (ConfigError, OSError):  # the model is not here
        return None
    return None if available is None else plan.needed <= available


def _without_lengths(setting: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in setting.items() if name != "lengths"}


def _print(rows: Sequence[Split], calibration: Calibration) -> None:
    from rich.table import Table

    from easyrl.runtime.terminal import print_plain

    measured = calibration.setting
    print_plain(f"the run: {calibration.step_s:.2f} s a batch in the median, as measured")
    table = Table(
        "endpoints", "places", "ranks", "batch", "mode", "s", "tok/s/dev", "idle", "memory"
    )
    for row in rows[:ROWS]:
        own, found = row.setting, row.outcome
        table.add_row(
            f"{own.endpoints}",
            f"{own.places}",
            f"{own.ranks}",
            f"{own.batch_size} x {own.group_size}",
            own.mode + (" (the run)" if own == measured else ""),
            f"{found.step_s:.2f}",
            f"{found.tokens_per_s_per_device(own):,.0f}",
            f"train {found.training_idle:.0%}, infer {found.inference_idle:.0%}",
            {True: "fits", False: "does not fit", None: "not known"}[row.fits],
        )
    print_plain(table)
