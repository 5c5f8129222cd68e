"""``easyrl plan RUN_DIR``: a run's batch simulated with other numbers of everything.

``easyrl plan --model 8b --device h100 --devices 16``: a batch that nobody has run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from easyrl.arguments.shared import AsJson
from easyrl.runtime.run_files import CONFIG_FILE, file_of_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from easyrl.config import Config
    from easyrl.simulation.cluster import Division, ModelSplit
    from easyrl.simulation.setting import Setting
    from easyrl.simulation.split import Split

ROWS = 8


class Measured(NamedTuple):
    """A run's setting, what its batches took, and what each takes when it is simulated itself."""

    setting: Setting
    num_batches: int
    median_s: float
    mean_s: float
    replayed_median_s: float
    replayed_mean_s: float

    def told(self) -> str:
        median_s, mean_s = self.replayed_median_s, self.replayed_mean_s
        return (
            f"the run: {self.num_batches} batches, {self.median_s:.2f} s in the median and "
            f"{self.mean_s:.2f} in the mean; simulated one by one, each with its own lengths: "
            f"{median_s:.2f} ({median_s / self.median_s - 1:+.1%}) and "
            f"{mean_s:.2f} ({mean_s / self.mean_s - 1:+.1%})\n"
            "below: the mean of batches that are drawn from all lengths"
        )


def plan_command(
    run_dir: Annotated[
        Path | None,
        typer.Argument(metavar="RUN_DIR", help="the run's run.output_dir; or give --model"),
    ] = None,
    endpoints: Annotated[int | None, typer.Option(help="inference endpoints", min=1)] = None,
    places: Annotated[int | None, typer.Option(help="requests in flight at each", min=1)] = None,
    ranks: Annotated[int | None, typer.Option(help="data-parallel ranks", min=1)] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="prompts of a batch; with --model by default 64", min=1)
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="responses of a prompt; with --model by default 16", min=1)
    ] = None,
    mode: Annotated[str | None, typer.Option(help="async or sync")] = None,
    mean_tokens: Annotated[
        float | None,
        typer.Option(
            help="of responses, log-normal; default: the run's lengths, with --model 8,800"
        ),
    ] = None,
    sigma: Annotated[float, typer.Option(help="of the logarithm of their lengths", min=0)] = 0.5,
    devices: Annotated[
        int | None,
        typer.Option(
            help="divide so many between inference and training; with --model by default 16", min=2
        ),
    ] = None,
    devices_per_endpoint: Annotated[
        int, typer.Option(help="devices of an inference endpoint", min=1)
    ] = 1,
    devices_per_rank: Annotated[int, typer.Option(help="devices of a training rank", min=1)] = 1,
    model: Annotated[
        str | None,
        typer.Option(help="in place of a run: 8b, 32b, 30b-a3b, or a folder with a config.json"),
    ] = None,
    device: Annotated[str, typer.Option(help="of --model: 910b or h100")] = "h100",
    png: Annotated[Path | None, typer.Option(help="draw the divisions into this file")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a run's batch with other endpoints, ranks, sizes, lengths or shares of devices.

    Or, with --model, a batch that nobody has run: rates by arithmetic from the model's sizes and
    the device's data sheet.
    """
    from dataclasses import replace

    from easyrl.config import ConfigError
    from easyrl.simulation.setting import Lengths, require_lengths
    from easyrl.simulation.split import Split, splits_of

    try:
        if mode not in (None, "async", "sync"):
            raise ValueError(f"--mode: is {mode!r}; async or sync")
        require_lengths(mean_tokens, sigma)
        if (run_dir is None) == (model is None):
            raise ValueError("give a run's folder, or --model and --device")
        rows: list[Split]
        measured: Measured | None = None
        splits: list[ModelSplit] = []
        asked: dict[str, Any] = {
            "endpoints": endpoints,
            "places": places,
            "ranks": ranks,
            "batch_size": batch_size,
            "group_size": group_size,
            "mode": mode,
        }
        asked = {name: value for name, value in asked.items() if value is not None}
        if run_dir is None:
            assert model is not None
            fixed = {"endpoints", "places", "ranks"} & set(asked)
            if fixed or devices_per_endpoint > 1 or devices_per_rank > 1:
                raise ValueError(
                    "--model: the division of the devices is what is looked for; leave out "
                    "--endpoints, --places, --ranks, --devices-per-endpoint and --devices-per-rank"
                )
            divisions = _divided(model, device, devices or 16, asked, mean_tokens, sigma)
            rows = [Split(each.setting, each.outcome, True) for each in divisions]
            splits = [each.split for each in divisions]
        else:
            config, measured = _calibrated(run_dir, devices_per_endpoint, devices_per_rank)
            own = measured.setting
            wanted = replace(own, **asked)
            if mean_tokens is not None:
                longest = config.rollout.max_tokens
                wanted = replace(wanted, lengths=Lengths((), mean_tokens, sigma, longest))
            if devices is not None:
                rows = splits_of(devices, wanted, fits=lambda ranks: _fits(config, ranks))
            else:
                from easyrl.simulation.pipeline import simulate

                settings = [own] if wanted == own else [own, wanted]
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
            _as_tree(row) | (splits[number]._asdict() if splits else {})
            for number, row in enumerate(rows)
        ]
        seconds: dict[str, float | None] = {"measured_step_s": None}
        if measured is not None:
            seconds = {
                "measured_step_s": measured.median_s,
                "measured_mean_s": measured.mean_s,
                "replayed_step_s": measured.replayed_median_s,
                "replayed_mean_s": measured.replayed_mean_s,
            }
        print(json.dumps(seconds | {"rows": told}))
        return
    _print(rows, measured, splits)


def _divided(
    model: str,
    device: str,
    devices: int,
    asked: dict[str, Any],
    mean_tokens: float | None,
    sigma: float,
) -> list[Division]:
    from easyrl.simulation.cluster import MEAN_TOKENS, Workload, divide, lengths_of_mean
    from easyrl.simulation.devices import Assumed, device_named
    from easyrl.simulation.known_models import shape_named

    lengths = lengths_of_mean(MEAN_TOKENS if mean_tokens is None else mean_tokens, sigma)
    own = device_named(device)
    return divide(shape_named(model), own, devices, Workload(lengths, **asked), Assumed())


def _calibrated(
    run_dir: Path, devices_per_endpoint: int, devices_per_rank: int
) -> tuple[Config, Measured]:
    import statistics

    from easyrl.config.file import load_config
    from easyrl.simulation.calibrate import calibrate, most_in_flight
    from easyrl.simulation.replay import replayed
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
    both = replayed(batches, calibration.setting)
    return config, Measured(
        calibration.setting,
        num_batches=len(both),
        median_s=statistics.median(each.measured_s for each in both),
        mean_s=statistics.mean(each.measured_s for each in both),
        replayed_median_s=statistics.median(each.simulated_s for each in both),
        replayed_mean_s=statistics.mean(each.simulated_s for each in both),
    )


def _fits(config: Config, ranks: int) -> bool | None:
    """Whether ``ranks`` have the memory on this machine's devices; None where nobody can say."""
    from easyrl.config import ConfigError
    from easyrl.memory_plan.plan import plan_memory
    from easyrl.memory_plan.verdict import LEFT_FREE, device_bytes

    try:
        available = device_bytes()
        plan = plan_memory(config, ranks * config.parallel.ranks_per_model)
    except (ConfigError, OSError):  # the model is not here
        return None
    return None if available is None else plan.needed <= available * (1 - LEFT_FREE)


def _as_tree(row: Split) -> dict[str, Any]:
    from dataclasses import asdict

    setting = asdict(row.setting)
    del setting["lengths"]
    found = asdict(row.outcome)
    return setting | found | {"tpspd": row.outcome.tpspd(row.setting), "fits": row.fits}


def _print(rows: Sequence[Split], measured: Measured | None, splits: Sequence[ModelSplit]) -> None:
    from rich.table import Table

    from easyrl.runtime.terminal import print_plain

    if measured is None:
        print_plain("no run: rates by arithmetic, from assumptions (docs/plan.md); fastest first")
    else:
        print_plain(measured.told())
    last = "model split" if splits else "memory"
    columns = ["endpoints", "places", "ranks", "batch", "mode", "s", "TPSPD", "idle", last]
    if any(measured is not None and row.setting == measured.setting for row in rows[:ROWS]):
        columns.insert(6, "measured")
    table = Table(*columns)
    for number, row in enumerate(rows[:ROWS]):
        own, found = row.setting, row.outcome
        is_the_run = measured is not None and own == measured.setting
        cells = [
            _with_devices(own.endpoints, own.devices_per_endpoint),
            f"{own.places}",
            _with_devices(own.ranks, own.devices_per_rank),
            f"{own.batch_size} x {own.group_size}",
            own.mode + (" (the run)" if is_the_run else ""),
            f"{found.step_s:.2f}",
            f"{found.tpspd(own):,.0f}",
            f"train {found.training_idle:.0%}, infer {found.inference_idle:.0%}",
            str(splits[number])
            if splits
            else {True: "fits", False: "does not fit", None: "not known"}[row.fits],
        ]
        if "measured" in columns:
            mean_s = measured.mean_s if measured is not None and is_the_run else None
            cells.insert(6, "" if mean_s is None else _beside(mean_s, found.step_s))
        table.add_row(*cells)
    print_plain(table)


def _beside(measured_s: float, simulated_s: float) -> str:
    """What was measured, and how far the simulation of the same is off."""
    return f"{measured_s:.2f} ({simulated_s / measured_s - 1:+.1%})"


def _with_devices(number: int, devices_of_each: int) -> str:
    return f"{number}" if devices_of_each == 1 else f"{number} of {devices_of_each}"
