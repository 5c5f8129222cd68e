"""Runs each script of arrivals in a pipeline, with both kinds of schedule.

Started by the ``deepspeed`` launcher with a folder that ``cases.write_models`` filled, a number of
repeats and of rows. Rank 0 appends a JSON line per script to ``rows-N.jsonl``, N processes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parts.layouts.cases import Case, configuration, functions, updates
from benchmarks.parts.schedules.arrivals import LAST, bound_s, script
from easyrl.engines.megatron.layout import Layout
from easyrl.engines.megatron.open_schedule import OpenSchedule
from easyrl.engines.megatron.pipeline import Pipeline
from easyrl.engines.megatron.process_groups import start_model_parallel
from easyrl.engines.megatron.stage import PolicyStage
from easyrl.engines.megatron.stage_links import StageLinks
from easyrl.engines.megatron.streams import Loss, StreamStage
from easyrl.engines.process_group import start_process_group
from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.supported import read_model_config
from easyrl.recipes.loading import load_recipe
from easyrl.schema import MicroBatch

FORWARD_S, BACKWARD_S = 0.03, 0.06  # that a stage's device is busy with a row


class Busy(torch.autograd.Function):
    """Sleeps as long as a device would work, forward and backward."""

    @staticmethod
    def forward(context: Any, hidden: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(BACKWARD_S)
        return gradient


class BusyStage(StreamStage):
    """A stage of the small model that takes the time of a large one's."""

    def hidden(self, row: MicroBatch, layout: SegmentLayout) -> Tensor:
        return Busy.apply(super().hidden(row, layout))  # type: ignore[no-untyped-call]

    def loss(self, row: MicroBatch, layout: SegmentLayout, loss: Loss) -> tuple[Tensor, Any]:
        loss_sum, metrics = super().loss(row, layout, loss)
        return Busy.apply(loss_sum), metrics  # type: ignore[no-untyped-call]


class BusyStages(Pipeline):
    """Of such stages."""

    def _streams(self, frozen: Collection[str], with_policy: bool) -> list[StreamStage]:
        return [BusyStage(stage, stage, {}) for stage in self.stages]


class BusyOpenSchedule(BusyStages, OpenSchedule):
    """Of such stages."""


class Schedules:
    """A pipeline of one copy of the model over all processes."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        layout = Layout(pipeline=dist.get_world_size())
        place = start_model_parallel(layout)
        case = Case("pp", layout)
        config = configuration(folder, case, {})
        self._stage = PolicyStage(
            read_model_config(config.model),
            place,
            torch.float32,
            attention=CheckedAttention(config.model.attention),
        )
        self._stage.load(config.model.path)
        made = functions(folder, case)
        groups = [group for update in updates() for group in update]
        of_each = [made.pack(made.trained([group], (), ()))[0] for group in groups]
        self.rows = [of_each[number % len(of_each)] for number in range(num_rows)]
        recipe = load_recipe(config.model_copy(update={"recipe": _without_kl(config)}))
        self._loss = Loss(recipe, True, "policy", config.rollout.temperature)
        parts = (layout, [self._stage], None, {}, torch.device("cpu"))
        self._flushed = BusyStages(*parts)
        self._open = BusyOpenSchedule(*parts, links=StageLinks(place))

    def flushes(self, arrivals: Sequence[float], start_s: float) -> int:
        """A schedule for each set of rows that is there; their number."""
        done = number = 0
        while done < len(self.rows):
            ready = torch.zeros(1, dtype=torch.int64)
            if dist.get_rank() == 0:
                time.sleep(max(0.0, start_s + arrivals[done] - time.monotonic()))
                now_s = time.monotonic() - start_s
                ready[0] = sum(at_s <= now_s for at_s in arrivals)
            dist.broadcast(ready, 0)
            taken = self.rows[done : max(int(ready), done + 1)]
            self._flushed.forward_backward(taken, self._loss, ())
            done, number = done + len(taken), number + 1
        return number

    def single(self, arrivals: Sequence[float], start_s: float) -> int:
        """One schedule, into which the head hands each row when it is there."""
        for row, at_s in zip(self.rows, arrivals, strict=True):
            if dist.get_rank() == 0:
                time.sleep(max(0.0, start_s + at_s - time.monotonic()))
            self._open.forward_backward([row], self._loss, ())
        self._open.finish()
        return 1

    def timed(self, kind: str, arrivals: Sequence[float]) -> tuple[float, int, dict[str, Tensor]]:
        """Seconds to the end of the last stage, schedules, this rank's gradients. Collective."""
        self._stage.zero_grad()
        dist.barrier()
        start_s = time.monotonic()
        number = getattr(self, kind)(arrivals, start_s)
        dist.barrier()
        seconds = time.monotonic() - start_s
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in self._stage.named_parameters()
            if parameter.grad is not None
        }
        return seconds, number, gradients


def main() -> None:
    folder, repeats, num_rows = Path(sys.argv[-3]), int(sys.argv[-2]), int(sys.argv[-1])
    start_process_group()
    torch.set_num_threads(1)
    schedules, size = Schedules(folder, num_rows), dist.get_world_size()
    row_s = FORWARD_S + BACKWARD_S
    schedules.timed("flushes", [0.0] * num_rows)  # what only the first pays for
    for name in LAST:
        arrivals = script(name, num_rows, num_rows * row_s)
        seconds: dict[str, list[float]] = {"flushes": [], "single": []}
        worst = num_flushes = 0.0
        for repeat in range(repeats):
            of_kind = {}
            for kind in sorted(seconds, reverse=bool(repeat % 2)):  # they take turns
                took_s, number, of_kind[kind] = schedules.timed(kind, arrivals)
                seconds[kind].append(took_s)
                num_flushes = number if kind == "flushes" else num_flushes
            worst = max(worst, _apart(of_kind["flushes"], of_kind["single"]))
        apart = torch.tensor([worst], dtype=torch.float64)
        dist.all_reduce(apart, dist.ReduceOp.MAX)
        least_s = bound_s(arrivals, row_s, size)
        medians = {kind: statistics.median(took) for kind, took in seconds.items()}
        line = {
            "pp": size,
            "arrivals": name,
            "flushes_s": round(medians["flushes"], 3),
            "single_s": round(medians["single"], 3),
            "bound_s": round(least_s, 3),
            "bubble": round(1 - least_s / medians["flushes"], 3),
            "bubble_single": round(1 - least_s / medians["single"], 3),
            "num_flushes": int(num_flushes),
            "gradients_apart": float(apart),
        }
        if dist.get_rank() == 0:
            with (folder / f"rows-{size}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _apart(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest relative difference of a parameter's gradient."""
    assert some.keys() == others.keys() and some
    return max(float((some[n] - others[n]).norm() / some[n].norm()) for n in some)


def _without_kl(config: Any) -> Any:
    return config.recipe.model_copy(update={"kl_coef": 0.0})


if __name__ == "__main__":
    main()
