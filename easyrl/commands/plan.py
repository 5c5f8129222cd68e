"""``easyrl plan RUN_DIR``: a run's batch simulated with other numbers of everything.

``easyrl plan --model 8b --device h100 --devices 16``: a batch that nobody has run, as is that of
``easyrl plan --rates rates.json --endpoints 2``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from easyrl.arguments.shared import AsJson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from easyrl.config import Config
    from easyrl.simulation.cluster import Division, ModelSplit
    from easyrl.simulation.run_setting import Measured
    from easyrl.simulation.setting import Setting
    from easyrl.simulation.split import Split

ROWS = 8


def plan_command(
    run_dir: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN_DIR", help="the run's run.output_dir; or give --model, or --rates"
        ),
    ] = None,
    endpoints: Annotated[
        int | None, typer.Option(help="inference endpoints; with --rates by default 1", min=1)
    ] = None,
    places: Annotated[
        int | None,
        typer.Option(help="requests in flight at each; with --rates by default 32", min=1),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="data-parallel ranks; with --rates by default 1", min=1)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="prompts of a batch; without a run by default 64", min=1)
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="responses of a prompt; without a run by default 16", min=1)
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="of a prompt; without a run by default 150", min=1)
    ] = None,
    mode: Annotated[str | None, typer.Option(help="async or sync")] = None,
    mean_tokens: Annotated[
        float | None,
        typer.Option(
            help="of responses, log-normal; default: the run's lengths, without a run 8,800"
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
        int | None,
        typer.Option(help="devices of an inference endpoint; default: the run's, else 1", min=1),
    ] = None,
    devices_per_rank: Annotated[
        int | None,
        typer.Option(help="devices of a training rank; default: the run's, else 1", min=1),
    ] = None,
    device_gb: Annotated[
        float | None,
        typer.Option(
            help="memory of a training device in 10^9 bytes, for a run; default: this machine's",
            min=0,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="in place of a run: 8b, 32b, 30b-a3b, or a folder with a config.json"),
    ] = None,
    device: Annotated[str, typer.Option(help="of --model: 910b or h100")] = "h100",
    rates: Annotated[
        Path | None,
        typer.Option(help="in place of a run: a JSON file with the rates that --json prints"),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="draw the divisions into this file")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a run's batch with other endpoints, ranks, sizes, lengths or shares of devices.

    Or a batch that nobody has run: with --model by arithmetic from the model's sizes and the
    device's data sheet, with --rates by what a file says.
    """
    from dataclasses import replace

    from easyrl.config import ConfigError
    from easyrl.simulation.setting import Lengths, require_lengths
    from easyrl.simulation.split import Split, splits_of

    try:
        if mode not in (None, "async", "sync"):
            raise ValueError(f"--mode: is {mode!r}; async or sync")
        require_lengths(mean_tokens, sigma)
        if sum(source is not None for source in (run_dir, model, rates)) != 1:
            raise ValueError("give a run's folder, or --model and --device, or --rates")
        if device_gb is not None and run_dir is None:
            raise ValueError("--device-gb: is for a run; --device names those of --model")
        rows: list[Split]
        measured: Measured | None = None
        splits: list[ModelSplit] = []
        of_batch = _given(
            batch_size=batch_size, group_size=group_size, prompt_tokens=prompt_tokens, mode=mode
        )
        numbers = _given(endpoints=endpoints, places=places, ranks=ranks)
        sizes = _given(devices_per_endpoint=devices_per_endpoint, devices_per_rank=devices_per_rank)
        if model is not None:
            if numbers or sizes:
                raise ValueError(
                    "--model: the division of the devices is what is looked for; leave out "
                    "--endpoints, --places, --ranks, --devices-per-endpoint and --devices-per-rank"
                )
            divisions = _divided(model, device, devices or 16, of_batch, mean_tokens, sigma)
            rows = [Split(each.setting, each.outcome, True) for each in divisions]
            splits = [each.split for each in divisions]
        else:
            config: Config | None = None
            if run_dir is not None:
                from easyrl.simulation.run_setting import measure_run

                config, measured = measure_run(run_dir)
                measured = measured._replace(setting=replace(measured.setting, **sizes))
                wanted = replace(measured.setting, **of_batch, **numbers)
                if mean_tokens is not None:
                    longest = config.rollout.max_tokens
                    wanted = replace(wanted, lengths=Lengths((), mean_tokens, sigma, longest))
            else:
                assert rates is not None
                wanted = replace(_stated(rates, mean_tokens, sigma), **of_batch, **numbers, **sizes)
            if devices is not None:
                rows = splits_of(devices, wanted, fits=lambda n: _fits(config, n, device_gb))
            else:
                from easyrl.simulation.pipeline import simulate

                own = wanted if measured is None else measured.setting
                settings = [own] if wanted == own else [own, wanted]
                rows = [Split(s, simulate(s), _fits(config, s.ranks, device_gb)) for s in settings]
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


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _stated(rates: Path, mean_tokens: float | None, sigma: float) -> Setting:
    """A batch by default, at the rates of a file."""
    from easyrl.simulation.cluster import MEAN_TOKENS, Workload, lengths_of_mean
    from easyrl.simulation.setting import Setting
    from easyrl.simulation.stated_rates import read_rates

    work = Workload(lengths_of_mean(MEAN_TOKENS if mean_tokens is None else mean_tokens, sigma))
    return Setting(
        read_rates(rates),
        work.lengths,
        endpoints=1,
        places=32,
        ranks=1,
        batch_size=work.batch_size,
        group_size=work.group_size,
        prompt_tokens=work.prompt_tokens,
    )


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


def _fits(config: Config | None, ranks: int, device_gb: float | None) -> bool | None:
    """Whether ``ranks`` have the memory on such devices, or on this machine's; None where nobody
    can say."""
    if config is None:
        return None
    from easyrl.config import ConfigError
    from easyrl.memory_plan.plan import plan_memory
    from easyrl.memory_plan.verdict import LEFT_FREE, device_bytes

    try:
        available = device_bytes() if device_gb is None else device_gb * 1e9
        if available is None:
            return None
        plan = plan_memory(config, ranks * config.parallel.ranks_per_model)
    except (ConfigError, OSError):  # the model is not here
        return None
    return plan.needed <= available * (1 - LEFT_FREE)


def _as_tree(row: Split) -> dict[str, Any]:
    from dataclasses import asdict

    setting = asdict(row.setting)
    del setting["lengths"]
    found = asdict(row.outcome)
    return setting | found | {"tpspd": row.outcome.tpspd(row.setting), "fits": row.fits}


def _print(rows: Sequence[Split], measured: Measured | None, splits: Sequence[ModelSplit]) -> None:
    from rich.table import Table

    from easyrl.runtime.terminal import print_plain

    if measured is not None:
        print_plain(measured.told())
    elif splits:
        print_plain("no run: rates by arithmetic, from assumptions (docs/plan.md); fastest first")
    else:
        print_plain("no run: rates as stated")
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
