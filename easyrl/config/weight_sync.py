"""Section ``weight_sync``: how weights reach the endpoints, and the proof that they did."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from easyrl.config.base import FilePath, Section

# Memory that trainer and endpoints of one host share; elsewhere than on Linux a folder on disk.
SHARED_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


class WeightSyncConfig(Section):
    """How weights reach the endpoints, and how much proof is asked for."""

    transport: Literal["auto", "file", "http", "nccl", "hccl"] = "auto"  # auto: files where the
    # endpoint sees the directory, else http; nccl, hccl: broadcast between devices
    directory: FilePath = SHARED_MEMORY  # of the weights: shared memory, or a disk that is shared
    access: Literal["owner", "group"] = "owner"  # who may read them there; group: also the members
    # of the folder's group, for endpoints of other Unix users (make the directory setgid for one)
    chunk_bytes: PositiveInt = 16 * 2**20
    advertise_host: str | None = None  # name under which endpoints reach this machine for http
    bind_host: str | None = None  # address that the http stream listens at, 0.0.0.0 for all;
    # default: that of advertise_host, else the one on the way to the endpoint
    port: NonNegativeInt = 0  # of the http stream; 0: a free one
    timeout_s: PositiveFloat = 600.0
    prove: bool = True  # every endpoint proves the bits of what it serves after each sync
    probe: bool = True
    canary: bool = True
    canary_tolerance: PositiveFloat | None = None  # mean |Δ log-prob|; default 1e-3 fp32, 5e-2 bf16
