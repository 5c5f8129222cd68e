"""Section ``weight_sync``: how weights reach the endpoints, and the proof that they did."""

from __future__ import annotations

import ipaddress
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from easyrl.config.base import FilePath, Section

# Memory that trainer and endpoints of one host share; elsewhere than on Linux a folder on disk.
SHARED_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


class WeightSyncConfig(Section):
    """How weights reach the endpoints, and how much proof is asked for."""

    lora: Literal["auto", "merged", "adapter"] = "merged"  # what travels of a policy with adapters:
    # the whole model, they merged into it, or they alone; auto: they alone if every endpoint takes
    # them and serves model.path below them, else the whole model
    transport: Literal["auto", "file", "http", "nccl", "hccl"] = "auto"  # auto: files where the
    # endpoint sees the directory, else http; nccl, hccl: broadcast between devices
    directory: FilePath = SHARED_MEMORY  # of the weights: shared memory, or a disk that is shared
    access: Literal["owner", "group"] = "owner"  # who may read them there; group: also the members
    # of the folder's group, for endpoints of other Unix users (make the directory setgid for one)
    chunk_bytes: PositiveInt = 16 * 2**20  # of the weights that are written, sent and loaded
    # together
    advertise_host: str | None = None  # name or address, IPv6 too, under which endpoints reach this
    # machine for http
    bind_host: str | None = None  # address that the http stream listens at, 0.0.0.0 for all;
    # default: that of advertise_host, else the one on the way to the endpoint
    port: NonNegativeInt = 0  # of the http stream; 0: a free one
    timeout_s: PositiveFloat = 600.0  # for an answer of an endpoint that is given weights or proves
    # them; one that let so much pass without answers is not pushed to a second time, and others
    # that are ready for the batch wait so long for the answers that it still owes
    prove: bool = True  # every endpoint proves the bits of what it serves after each sync
    probe: bool = True  # at the start a changed version has to show in what each endpoint says
    canary: bool = True  # each sync compares an endpoint's log-probabilities of a few responses
    # with the trainer's
    canary_tolerance: PositiveFloat | None = None  # mean |Δ log-prob|; default 1e-3 fp32, 5e-2
    # bf16; with prove a warning up to 0.5 nats
    agreement_tolerance: PositiveFloat | None = None  # of each endpoint's trained tokens, mean
    # |Δ log-prob|; default 2.5e-2 fp32, 0.2 bf16, not judged with rollout.allow_off_policy_sampling

    @field_validator("advertise_host")
    @classmethod
    def _host(cls, value: str | None) -> str | None:
        """Without the brackets that an IPv6 address has in a URL."""
        if value is None:
            return None
        host = value[1:-1] if value.startswith("[") and value.endswith("]") else value
        try:
            if ":" in host:
                ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(
                "is no name and no address; leave off http:// and the port, which is "
                "weight_sync.port"
            ) from None
        return host
