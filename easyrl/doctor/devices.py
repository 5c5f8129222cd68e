"""Whether this machine has as many accelerators as trainer and own servers will use."""

from __future__ import annotations

import torch

from easyrl.config import Config
from easyrl.doctor.finding import Finding, failed, not_checked, ok


def device_finding(config: Config, world_size: int, *, is_given: bool) -> Finding:
    """``world_size``: training processes, a device each; ``is_given`` by the user.

    One that is given may be of several machines: what others have is not checked.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    servers = _server_devices(config)
    if kind is None:
        if servers:
            return not_checked(
                "devices", "torch sees no accelerator here; vLLM's servers may have their own"
            )
        return ok("devices", "no accelerator: the run trains on the CPU")
    count, needed = torch.accelerator.device_count(), world_size + servers
    said = f"{count} {kind.type} device{'s' * (count != 1)}"
    what = f"{world_size} for training" + f" and {servers} for inference.launch" * bool(servers)
    if needed <= count:
        return ok("devices", f"{said}; {what}")
    if is_given and not servers:
        return not_checked("devices", f"{said} here; {what}: the others are on other machines")
    return failed(
        "devices",
        f"{said}, but {what} are needed",
        "lower parallel.tensor, parallel.pipeline or inference.launch.count, or give --world-size",
    )


def _server_devices(config: Config) -> int:
    """Of the run's own vLLM servers; the embedded engine runs on the CPU."""
    launch = config.inference.launch
    if launch is None or launch.engine != "vllm":
        return 0
    if launch.devices is not None:
        return len({device for devices in launch.devices for device in devices})
    return launch.count * launch.tensor_parallel
