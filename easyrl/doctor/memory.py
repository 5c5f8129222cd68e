"""Memory of each rank's device, by the plan of ``easyrl plan-memory``, and of this host."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import torch

from easyrl.config import Config
from easyrl.doctor.finding import Finding, failed, not_checked, ok
from easyrl.doctor.sizes import size
from easyrl.memory_plan.plan import MemoryPlan, plan_memory
from easyrl.memory_plan.remedies import Load
from easyrl.memory_plan.verdict import LEFT_FREE, device_bytes, judge


def check_memory(config: Config, world_size: int, load: Load) -> Iterator[Finding]:
    """``load`` gives ``config`` with further keys, for remedies. Raises ``ConfigError``."""
    device = device_bytes()
    plan = plan_memory(config, world_size, on_cpu=device is None)
    if device is not None:
        yield _device_finding(plan, device, load)
    yield _host_finding(plan, world_size, on_cpu=device is None)


def _device_finding(plan: MemoryPlan, device: float, load: Load) -> Finding:
    verdict, name = judge(plan, device, load), "memory of a rank"
    usable = device * (1 - LEFT_FREE)
    said = f"{size(plan.needed)} needed of {size(usable)}, nine tenths of the device"
    if verdict.fits:
        return ok(name, said)
    changes = " | ".join(map(str, verdict.changes))
    return failed(name, said, changes or "use a smaller model, or more devices; easyrl plan-memory")


def _host_finding(plan: MemoryPlan, world_size: int, *, on_cpu: bool) -> Finding:
    """Of the ranks that this machine would have: as many as devices, without any all."""
    local = world_size if on_cpu else min(world_size, torch.accelerator.device_count())
    each = max(s.held.host + (s.needed if on_cpu else 0.0) for s in plan.stages)
    free, name = float(psutil.virtual_memory().available), "memory of the host"
    said = f"{size(local * each)} needed by {local} ranks, {size(free)} are available"
    if local * each <= free:
        return ok(name, said)
    if local < world_size:
        return not_checked(name, f"{said}; the others are on other machines")
    return failed(
        name, said, "trainer.offload_optimizer=false, fewer ranks, or a machine with more memory"
    )
