"""The ranks' key-value stores: rank 0 listens where the other ranks come from, and nowhere else.

PyTorch's own ``TCPStore`` listens on all addresses, and who reaches one may read and write it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from easyrl.config import ConfigError
from easyrl.runtime.interfaces import is_loopback, own_address

logger = logging.getLogger(__name__)

RENDEZVOUS = "easyrl-ranks://"  # an ``init_method`` of torch.distributed


def spans_hosts() -> bool:
    """Whether some ranks are on other hosts; not where the launcher (ours, torchrun) is silent."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    num_here = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or num_ranks
    return int(num_ranks) > int(num_here)


def serve_store(host: str, port: int = 0, **options: Any) -> dist.TCPStore:
    """A store at ``host``, an address of this machine; port 0: a free one.

    Raises ``ConfigError`` if the port is in use. ``options`` are the store's.
    """
    address = own_address(host)
    if address is None or (is_loopback(address) and spans_hosts()):
        logger.warning(
            "the ranks' store listens on all addresses: %s is no address of this node that the "
            "others reach; give the launcher one (--master_addr)",
            host,
        )
        address = ""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"MASTER_PORT: rank 0 cannot listen at {host}:{port} ({error.strerror}); give the "
            "launcher another port (--master_port)"
        ) from error
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address or host, port, is_master=True, master_listen_fd=listener.detach(), **options
    )


def _rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """Store, rank and number of ranks, as the launcher's environment says."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        yield dist.HashStore(), rank, world_size  # nobody listens
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun has its own
    if rank == 0 and not by_agent:
        yield serve_store(host, port, world_size=world_size, timeout=timeout), rank, world_size
    else:
        store = dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
        yield store, rank, world_size


register_rendezvous_handler(RENDEZVOUS.partition(":")[0], _rendezvous)
