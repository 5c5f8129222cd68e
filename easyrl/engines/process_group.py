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

from easyrl.runtime.interfaces import interface_of
from easyrl.runtime.rank_store import RENDEZVOUS, spans_hosts


def start_process_group() -> int:
    """Joins the processes that the launcher started, or makes a group of one; the local rank."""
    deepspeed_logger.setLevel(logging.WARNING)
    # DeepSpeed calls collectives by their old names, once per parameter
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    if not spans_hosts() and (loopback := interface_of("127.0.0.1")) is not None:
        # else each rank listens at the address of this host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
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


def quiet() -> redirect_stdout[io.StringIO]:
    """Inside, DeepSpeed's bare ``print`` calls (memory statistics) stay off the console."""
    return redirect_stdout(io.StringIO())
