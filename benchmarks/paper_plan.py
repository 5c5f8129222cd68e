"""What ``easyrl plan --model`` says of the paper's models, and of what the paper measured.

``python -m benchmarks.paper_plan [--only TEXT]``

First the settings of the paper's tables (§6): predicted tokens per second and device beside the
measured ones. Batch, group size and the division of the devices are not stated there: 64 prompts
(48 of the 32B) with 16 responses each, as many tokens as the table's, and the division that is
predicted to be fastest. Three models in each micro-batch and a prompt for each response, as in the
paper. Then a table of 8B, 32B and 30B-A3B on 16, 64 and 384 devices of two classes, with 64 prompts
for all of them, and with 4 for each device. Nothing is measured here: arithmetic and assumptions
(docs/plan.md). Tables are Markdown; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Literal, NamedTuple

from benchmarks.parts.paper import figures
from easyrl.memory_plan.model_shape import ModelShape
from easyrl.simulation.cluster import (
    MEAN_TOKENS,
    Division,
    Workload,
    divide,
    lengths_of_mean,
)
from easyrl.simulation.devices import DEVICES, Assumed
from easyrl.simulation.known_models import KNOWN, shape_named

SIGMA, GROUP_SIZE, PROMPT_TOKENS = 0.5, 16, 150
NUM_DEVICES = (16, 64, 384)
PROMPTS, PROMPTS_PER_DEVICE = 64, 4


class Measured(NamedTuple):
    """A row of the paper's tables, as it is predicted."""

    name: str
    model: str
    published: figures.Published
    batch_size: int
    mode: Literal["async", "sync"] = "async"
    # of its own table where it has no tokens
    tokens: figures.Published | None = None

    @property
    def workload(self) -> Workload:
        of = self.tokens or self.published
        sequence = of.trained_tokens / of.steps / (self.batch_size * GROUP_SIZE)
        return Workload(
            lengths_of_mean(sequence - PROMPT_TOKENS, SIGMA),
            batch_size=self.batch_size,
            group_size=GROUP_SIZE,
            prompt_tokens=PROMPT_TOKENS,
            mode=self.mode,
            frozen=2,
            shares_prompts=False,
        )


MEASURED = (
    Measured("table 1, sync", "8b", figures.SYNC_8B, 64, "sync"),
    Measured("table 1, async", "8b", figures.ASYNC_8B, 64),
    Measured("table 2, async", "32b", figures.ASYNC_32B, 48),
    *(
        Measured(f"table 3, {n}", "8b", published, 64, tokens=figures.ASYNC_8B)
        for n, published in figures.SCALING_8B.items()
    ),
)


def main() -> None:
    arguments = _parse()
    shapes = {name: shape_named(name) for name in KNOWN}
    print("| paper | devices | predicted TPSPD | measured | predicted / measured | division |")
    print("|---|---|---|---|---|---|")
    paper = [_compared(row, shapes[row.model]) for row in MEASURED if arguments.only in row.name]
    print("\n| model | device | devices | prompts | s a batch | TPSPD | idle | division |")
    print("|---|---|---|---|---|---|---|---|")
    rows = [
        _predicted(model, device, devices, batch_size, shapes[model])
        for model in KNOWN
        for device in DEVICES
        for devices in NUM_DEVICES
        for batch_size in sorted({PROMPTS, PROMPTS_PER_DEVICE * devices})
        if arguments.only in f"{model} {device} {devices}"
    ]
    print(json.dumps({"paper": paper, "rows": rows}))


def _compared(row: Measured, shape: ModelShape) -> dict[str, Any]:
    own = row.published
    best = divide(shape, DEVICES["910b"], own.devices, row.workload, Assumed())[0]
    tpspd = best.outcome.tpspd(best.setting)
    ratio = tpspd / own.tpspd
    print(
        f"| {row.name} | {own.devices} | {tpspd:,.0f} | {own.tpspd:,.0f} | {ratio:.2f} | "
        f"{_division(best)} |",
        flush=True,
    )
    return {
        "name": row.name,
        "devices": own.devices,
        "predicted_tpspd": round(tpspd, 1),
        "measured_tpspd": own.tpspd,
        "ratio": round(ratio, 3),
    }


def _predicted(
    model: str, device: str, devices: int, batch_size: int, shape: ModelShape
) -> dict[str, Any]:
    lengths = lengths_of_mean(MEAN_TOKENS, SIGMA)
    workload = Workload(lengths, batch_size=batch_size, group_size=GROUP_SIZE)
    row: dict[str, Any] = {"model": model, "device": device, "devices": devices}
    row["batch_size"] = batch_size
    own = DEVICES[device]
    start = f"| {KNOWN[model]} | {own.name} | {devices} | {batch_size:,} |"
    try:
        best = divide(shape, own, devices, workload, Assumed())[0]
    except ValueError as error:
        print(f"{start} does not fit | – | – | – |", flush=True)
        return row | {"does_not_fit": str(error)}
    outcome, tpspd = best.outcome, best.outcome.tpspd(best.setting)
    idle = f"training {outcome.training_idle:.0%}, inference {outcome.inference_idle:.0%}"
    print(
        f"{start} {outcome.step_s:,.0f} | {tpspd:,.0f} | {idle} | {_division(best)} |", flush=True
    )
    return row | {"step_s": round(outcome.step_s, 1), "tpspd": round(tpspd, 1)}


def _division(best: Division) -> str:
    own = best.setting
    return (
        f"servers {own.endpoints} x {own.devices_per_endpoint} ({own.places} places), "
        f"training {own.ranks} x {own.devices_per_rank} ({best.split})"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="rows whose name has this: 'async', '8b h100'")
    return parser.parse_args()


if __name__ == "__main__":
    main()
