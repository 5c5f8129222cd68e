"""Which devices of this machine are trained on, beside those that its servers have."""

from __future__ import annotations

from easyrl.config import Config, ConfigError, LaunchConfig


def training_devices(config: Config, launch: LaunchConfig, num_there: int) -> list[int]:
    """Indices of ``trainer.num_devices`` devices that no server has; none on a machine without any.

    ``num_there``: GPUs or NPUs of this machine. Raises ``ConfigError`` where too few are left.
    """
    if num_there == 0:
        return []
    taken = _of_servers(launch)
    free = [index for index in range(num_there) if index not in taken]
    wanted = config.trainer.num_devices
    if len(free) < wanted:
        raise ConfigError(
            f"trainer.num_devices: {wanted} are wanted, but of {num_there} devices servers have "
            f"{len(taken)} (inference.launch); lower one of the two"
        )
    return free[:wanted]


def _of_servers(launch: LaunchConfig) -> set[int]:
    """As ``ManagedServers`` gives them."""
    if launch.devices is not None:
        return {index for devices in launch.devices for index in devices}
    if launch.engine == "embedded":
        return set()
    return set(range(launch.count * launch.tensor_parallel))
