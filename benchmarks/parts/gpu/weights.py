"""Rows ``weights`` of ``benchmarks.gpu``: from a device's weights to the host, and to the artefact
that endpoints read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.parts.gpu.model import Clock, num_parameters, random_policy
from benchmarks.parts.gpu.rows import ModelShape, Row
from easyrl.engines.host_copies import HostCopy, one_ahead

CHUNK_BYTES = 256 * 2**20
SHARED_MEMORY = Path("/dev/shm")


def measure_weights(row: Row, shape: ModelShape, device: torch.device) -> dict[str, Any]:
    """GB/s of the second pass, whose page-locked memory and files are there."""
    policy = random_policy(shape, row, device)
    clock = Clock(device)

    def copy() -> None:
        for _ in copied(policy):
            pass

    def pageable() -> None:
        for parameter in policy.parameters():
            parameter.detach().to("cpu", copy=True)

    size = sum(p.nbytes for p in policy.parameters())
    numbers: dict[str, Any] = {"parameters": num_parameters(shape), "bytes": size}
    for name, work in (("pageable_gb_per_s", pageable), ("copy_gb_per_s", copy)):
        work()
        numbers[name] = size / clock.seconds(work) / 1e9
    return numbers | _artefact(policy, size, clock)


def copied(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As the engine's pass over the weights, of a model that is whole."""

    def modules() -> Iterator[HostCopy]:
        for _, group in groupby(policy.named_parameters(), lambda p: p[0].rpartition(".")[0]):
            yield HostCopy(dict(group))

    for values in one_ahead(modules()):
        yield from values.items()
        del values


def _artefact(policy: nn.Module, size: int, clock: Clock) -> dict[str, Any]:
    try:
        from easyrl.inference_client.transfer.artifact import ReusedMemory, write_artifact
    except ImportError as error:
        return {"artefact_gb_per_s": None, "note": f"no artefact: {error}"}
    folder = _roomiest(size)
    if folder is None:
        return {"artefact_gb_per_s": None, "note": "no room for two artefacts"}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        root = Path(name)
        memory = ReusedMemory(root)
        passes = iter(range(3))

        def write() -> None:
            write_artifact(
                copied(policy), root / "weights", str(next(passes)), CHUNK_BYTES, memory=memory
            )

        write()
        seconds = clock.seconds(write)
    note = "" if folder == SHARED_MEMORY else "artefact on a disk"
    return {"artefact_gb_per_s": size / seconds / 1e9, "note": note}


def _roomiest(size: int) -> Path | None:
    """Shared memory, or the temporary folder where that is too small."""
    for folder in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        if folder.is_dir() and shutil.disk_usage(folder).free > 1.2 * size:
            return folder
    return None
