"""Peak memory of each rank of a split model while its weights are made ready to be sent.

Started by the ``deepspeed`` launcher with a folder that has the model, a tensor and a pipeline
size. Rank 0 writes ``peaks.json``.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parts.split_sync.setting import configuration
from easyrl.engines.megatron.engine import MegatronEngine
from easyrl.engines.megatron.layout import Layout
from easyrl.engines.process_group import start_process_group

Weights = Iterator[tuple[str, Tensor]]


def by_stage(engine: MegatronEngine) -> None:
    """Each stage on its first tensor rank, a parameter at a time; as a push does."""
    _pass(engine.stage_weights())


def by_head(engine: MegatronEngine) -> None:
    """All stages on the head, a parameter at a time."""
    _pass(engine.named_weights())


def all_gather(engine: MegatronEngine) -> None:
    """The whole model on every rank at once."""
    shapes = {name: weight.shape for name, weight in _headers(engine)}
    whole = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, weight in engine.named_weights():
        if weight.device.type != "meta":
            whole[name].copy_(weight)
    for weight in whole.values():
        dist.broadcast(weight, 0)


def _headers(engine: MegatronEngine) -> Weights:
    return ((name, weight.to("meta")) for name, weight in engine.named_weights())


def _pass(weights: Weights) -> None:
    """Each tensor is valid until the next one is asked for, and is read."""
    for _, weight in weights:
        if weight.device.type != "meta":
            weight.view(-1).view(torch.uint8)[::4096].sum()


def extra_bytes(work: Callable[[MegatronEngine], None], engine: MegatronEngine) -> list[int]:
    """Of each rank: its largest resident set beyond what it began with. Collective."""
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    before = _resident("VmRSS")
    work(engine)
    peak = torch.tensor([max(0, _resident("VmHWM") - before)])
    told = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(told, peak)
    return [int(each) for each in told]


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    folder, tensor, pipeline = Path(sys.argv[-3]), int(sys.argv[-2]), int(sys.argv[-1])
    start_process_group()
    torch.set_num_threads(1)
    engine = MegatronEngine(configuration(folder), Layout(tensor, pipeline))
    by_stage(engine)  # what only the first pays for
    ways = {"by_stage": by_stage, "by_head": by_head, "all_gather": all_gather}
    peaks = {name: extra_bytes(work, engine) for name, work in ways.items()}
    own = sum(p.numel() * p.element_size() for p in engine._parameters().values())
    held = torch.tensor([own])
    told = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(told, held)
    if dist.get_rank() == 0:
        record = {"peaks": peaks, "held": [int(each) for each in told]}
        (folder / "peaks.json").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
