"""The processes that train together, whether a launcher started them or there is only one."""

from __future__ import annotations

import io
import logging
import os
import warnings
from contextlib import redirect_stdout

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger as deepspeed_logger

from easyrl.config import ConfigError
from easyrl.runtime.allocator import use_expandable_segments
from easyrl.runtime.interfaces import interface_of, is_loopback, local_address
from easyrl.runtime.rank_store import RENDEZVOUS, spans_hosts

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def start_process_group() -> int:
    """Joins the processes that the launcher started, or makes a group of one; the local rank.

    Raises ``ConfigError`` if those of other hosts cannot be joined.
    """
    use_expandable_segments(os.environ)
    deepspeed_logger.setLevel(logging.WARNING)
    # DeepSpeed calls collectives by their old names, once per parameter
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    if GLOO_INTERFACE not in os.environ and (interface := _gloo_interface()) is not None:
        os.environ[GLOO_INTERFACE] = interface
    local_rank = int(os.environ["LOCAL_RANK"])
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(local_rank)
    backend = "gloo" if accelerator.device_name() == "cpu" else None  # None: the device's own
    # An all-reduce for inference on CPUs that we do not use; it would need a C++ compiler here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, verbose=False, init_method=RENDEZVOUS
    )
    return local_rank


def _gloo_interface() -> str | None:
    """Where ranks listen for each other; on one host nowhere else than on the loopback."""
    if spans_hosts():
        return _interface_between_hosts(os.environ["MASTER_ADDR"])
    return interface_of("127.0.0.1")


def _interface_between_hosts(master: str) -> str:
    """The interface on the way to ``master``, the first host, or that has its address.

    Left to itself, gloo takes the one that this host's own name leads to: on Debian the loopback.
    """
    try:
        address = local_address(master)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR: no way leads to {master}, the first training node: {error}; give the "
            "launcher an address that all nodes reach (--master_addr)"
        ) from None
    interface = None if is_loopback(address) else interface_of(address)
    if interface is None:
        raise ConfigError(
            f"MASTER_ADDR: {master} leads to {address} on this node, which no other node reaches; "
            "give the launcher the first node's address in the network (--master_addr), or name "
            f"the interface in the environment variable {GLOO_INTERFACE}"
        )
    return interface


def quiet() -> redirect_stdout[io.StringIO]:
    """Inside, DeepSpeed's bare ``print`` calls (memory statistics) stay off the console."""
    return redirect_stdout(io.StringIO())
