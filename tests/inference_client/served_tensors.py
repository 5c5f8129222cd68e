"""What workers answer to a proof's question, and an artefact that is held in memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from easyrl.inference_client.client import WorkerProof
from easyrl.inference_client.transfer.artifact_reader import ArtifactReader, DamagedArtifact
from easyrl.inference_client.vllm_plugin.easyrl_vllm.chunk_format import DTYPE_NAMES, Entry
from easyrl.inference_client.vllm_plugin.easyrl_vllm.keyed_digests import slice_digest, whole_slice
from easyrl.inference_client.vllm_plugin.easyrl_vllm.slices import ServedSlice, Slice


class ArtifactInMemory(ArtifactReader):
    """``weights``; ``damaged`` are not what was written. Notes what was read."""

    def __init__(
        self, weights: Mapping[str, Tensor], damaged: frozenset[str] = frozenset()
    ) -> None:
        self.weights, self.damaged = weights, damaged
        self.num_read = 0

    def read(self, name: str) -> Tensor:
        self.num_read += 1
        return self.weights[name]

    def verify(self, name: str) -> None:
        if name in self.damaged:
            raise DamagedArtifact(f"tensor {name!r} was changed after it was written")


def shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (DTYPE_NAMES[w.dtype], tuple(w.shape)) for name, w in weights.items()}


def entries(weights: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    found, start = [], 0
    for name, weight in weights.items():
        end = start + weight.nbytes
        found.append(Entry(name, weight.dtype, tuple(weight.shape), weight.nbytes, start, end))
        start = end
    return tuple(found)


def whole(weights: Mapping[str, Tensor], nonce: bytes, **problems: str) -> WorkerProof:
    """The answer of a worker that serves ``weights`` in one piece each."""
    slices = {
        name: [ServedSlice(whole_slice(weight.dtype, weight.shape), slice_digest(weight, nonce))]
        for name, weight in weights.items()
    }
    return WorkerProof(slices, problems, "file")


def rows(weight: Tensor, first: int, last: int, nonce: bytes) -> ServedSlice:
    """Rows ``[first, last)`` of a tensor."""
    starts = (first, *(0,) * (weight.dim() - 1))
    part = Slice(starts, (last - first, *weight.shape[1:]), DTYPE_NAMES[weight.dtype])
    return ServedSlice(part, slice_digest(weight[first:last], nonce))
