"""``easyrl plan-memory CONFIG [key=value …]``: what each rank will need, before anything is run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from easyrl.arguments.shared import AsJson, ConfigFile, Overrides, WorldSize
from easyrl.config import Config, ConfigError
from easyrl.config.file import load_config
from easyrl.hub.models import with_local_models
from easyrl.runtime.terminal import print_plain

if TYPE_CHECKING:
    from easyrl.memory_plan.plan import MemoryPlan
    from easyrl.memory_plan.verdict import Verdict

GB = 1e9
HELD = {
    "weights": "weights",
    "frozen": "frozen models",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "critic": "critic",
}
RUNNING = {
    "activations": "activations",
    "working": "projection, or a layer's backward",
    "buffers": "communication",
}


def plan_memory_command(
    config: ConfigFile,
    overrides: Overrides = None,
    world_size: WorldSize = None,
    device_gb: Annotated[
        float | None,
        typer.Option(help="memory of a device in 10^9 bytes; default: this machine's", min=0),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan the memory of each rank from the configuration and config.json; no weights are read.

    Exits with 1 if it does not fit.
    """
    given = overrides or []
    try:
        load = partial(_load, config, given)
        checked = load([])
        from easyrl.memory_plan.plan import plan_memory
        from easyrl.memory_plan.verdict import device_bytes, judge

        plan = plan_memory(checked, world_size or checked.parallel.ranks_per_model)
        device = device_bytes() if device_gb is None else device_gb * GB
        verdict = judge(plan, device, load)
    except ConfigError as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(_as_tree(plan, verdict)))
    else:
        print_plain(_heading(checked, plan))
        print_plain(_table(plan))
        print_plain(_told(plan, verdict))
    raise typer.Exit(1 if verdict.fits is False else 0)


def _load(file: Path, overrides: Sequence[str], more: Sequence[str]) -> Config:
    return with_local_models(load_config(file, [*overrides, *more]))


def _as_tree(plan: MemoryPlan, verdict: Verdict) -> dict[str, Any]:
    stages = [
        asdict(s.held)
        | asdict(s.running)
        | {
            "num_layers": s.stage.num_layers,
            "num_parameters": s.stage.num_parameters,
            "needed": s.needed,
        }
        for s in plan.stages
    ]
    return {
        "architecture": plan.shape.architecture,
        "num_parameters": plan.shape.num_parameters,
        "layout": asdict(plan.layout),
        "row_tokens": plan.row_tokens,
        "stages": stages,
        "needed": plan.needed,
        "device": verdict.device,
        "fits": verdict.fits,
        "remedies": [str(change) for change in verdict.changes],
    }


def _heading(config: Config, plan: MemoryPlan) -> str:
    shape, layout = plan.shape, plan.layout
    with_sequence = " with sequence" if layout.sequence_parallel else ""
    return (
        f"{shape.architecture}, {shape.num_parameters / 1e9:.2f} B parameters, "
        f"{config.model.dtype}; {layout.world_size} processes: tensor {layout.tensor}"
        f"{with_sequence} · pipeline {layout.pipeline} · data {layout.data}, ZeRO "
        f"{config.trainer.zero_stage}; rows of {plan.row_tokens} tokens"
    )


def _table(plan: MemoryPlan) -> Table:
    """A row for each part, a column for each stage."""
    is_pipeline = len(plan.stages) > 1
    names = [f"stage {s.stage.number}" if is_pipeline else "GB" for s in plan.stages]
    table = Table("each rank, GB" if is_pipeline else "each rank", *names)

    def add(name: str, values: list[float]) -> None:
        if any(values):
            table.add_row(name, *(f"{value / GB:.2f}" for value in values))

    for part, name in HELD.items():
        add(name, [getattr(s.held, part) for s in plan.stages])
    for part, name in RUNNING.items():
        add(name, [getattr(s.running, part) for s in plan.stages])
    add("the step, instead of the last three", [s.held.step for s in plan.stages])
    table.add_section()
    add("needed", [s.needed for s in plan.stages])
    add("of the host, page-locked", [s.held.host for s in plan.stages])
    if is_pipeline:
        table.add_section()
        table.add_row("layers", *(str(s.stage.num_layers) for s in plan.stages))
        table.add_row("rows in flight", *(f"{s.running.rows_in_flight:g}" for s in plan.stages))
    return table


def _told(plan: MemoryPlan, verdict: Verdict) -> str:
    from easyrl.memory_plan.verdict import LEFT_FREE

    needed = plan.needed / GB
    if verdict.device is None:
        return f"{needed:.1f} GB needed; this machine has no accelerator, name one: --device-gb 80"
    usable = f"{verdict.device * (1 - LEFT_FREE) / GB:.1f} GB, nine tenths of the device"
    if verdict.fits:
        return f"fits: {needed:.1f} GB needed of {usable}"
    told = f"does not fit: {needed:.1f} GB needed of {usable}. "
    if verdict.changes:
        return f"{told}It would with: {' | '.join(map(str, verdict.changes))}"
    return (
        f"{told}None of the changes that were tried is enough; use a smaller model, or more "
        "devices with parallel.tensor and parallel.pipeline"
    )
