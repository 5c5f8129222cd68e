"""Classes of devices by their makers' numbers, and what part of them a run is taken to reach.

Nothing here was measured by this project. Peaks are dense bf16 products.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator; bytes and seconds."""

    name: str
    flops: float  # bf16, dense, per second
    memory_per_s: float  # bytes
    memory: float  # bytes
    node_per_s: float  # bytes to other devices of its node, one direction
    network_per_s: float  # bytes to other nodes, one direction
    per_node: int = 8
    source: str = ""


DEVICES = {
    # The bins of the 910B differ: 280 TFLOP/s is the least that is sold with 64 GB; half of a 910C,
    # which is two such dies, is 376 (752 and 3.2 TB/s a package).
    "910b": Device(
        "Ascend 910B",
        flops=280e12,
        memory_per_s=1.6e12,
        memory=64e9,
        node_per_s=196e9,
        network_per_s=100e9 / 8,
        source=(
            "FLOP/s and memory: Gitee AI's page on its 910B clusters; memory bandwidth: half of a "
            "910C's (arXiv:2506.12708); links: the paper, §6"
        ),
    ),
    "h100": Device(
        "H100 SXM",
        flops=989e12,
        memory_per_s=3.35e12,
        memory=80e9,
        node_per_s=450e9,
        network_per_s=400e9 / 8,
        source="NVIDIA's data sheets of the H100 SXM and the DGX H100 (400 Gb/s a GPU)",
    ),
}


@dataclass(frozen=True)
class Assumed:
    """Shares of the peaks that are reached, and the like: assumptions, none fitted to a result."""

    # of memory bandwidth while decoding; servers that are tuned are said to reach 60 to 85 %
    decode_bandwidth: float = 0.6
    # MFU of a forward and backward, where layers are computed again but not counted
    training: float = 0.35
    forward: float = 0.45  # MFU of frozen models and of prompts
    mixture: float = 0.5  # of both, where a token goes through a few of many experts
    links: float = 0.7  # of the links' bandwidth
    message_s: float = 20e-6  # an all-reduce of a few tokens; two in each layer of a split server
    server_memory: float = 0.9  # of a device's, vLLM's default
    server_reserve: float = 2e9  # bytes of it on each device that are neither weights nor keys
    most_running: int = 256  # sequences of a server, vLLM's default


def device_named(name: str) -> Device:
    """Raises ``ValueError`` with the known names."""
    if name.lower() not in DEVICES:
        raise ValueError(f"--device: {name!r} is not known; one of {', '.join(DEVICES)}")
    return DEVICES[name.lower()]
