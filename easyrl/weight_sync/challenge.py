"""Challenge and response: whether workers serve an artifact's weights, asked with a fresh nonce.

The question holds names, dtypes, shapes and a nonce; the answers hold digests keyed with it, of the
slices that each worker serves. What they have to be is formed here from the artifact, and stands in
no question. Answers are input: they size no work before they are checked.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import numpy as np
from blake3 import blake3
from torch import Tensor

from easyrl.inference_client.client import TensorShapes, WorkerProof
from easyrl.inference_client.transfer.artifact_reader import DamagedArtifact
from easyrl.inference_client.vllm_plugin.easyrl_vllm.chunk_format import (
    DTYPE_NAMES,
    DTYPES,
    HASH,
    Chunk,
)
from easyrl.inference_client.vllm_plugin.easyrl_vllm.keyed_digests import slice_digest, whole_slice
from easyrl.inference_client.vllm_plugin.easyrl_vllm.slices import ServedSlice, Slice

NONCE_BYTES = 32
MOST_SLICES = 1024  # different ones of a tensor, of all workers together
MOST_COPIES = 8  # how often these may cover the tensor: forms that are hashed, not workers
MOST_CELLS = 2**20  # that the edges of a tensor's slices cut it into

SliceOf = tuple[str, Slice]  # a tensor's name and a slice of it


class UnknownSlices(RuntimeError):
    """Slices whose digests nobody here can form: the artifact is on another host."""


class MalformedAnswer(ValueError):
    """An answer names slices that a tensor cannot have."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What is wrong with the answers of an endpoint's workers; nothing, if both are empty."""

    wrong: Sequence[Mapping[str, str]]  # by worker, then by tensor: what is wrong with it
    uncovered: Sequence[str]  # tensors of which no worker has shown every number


class TensorReader(Protocol):
    """The tensors that workers should serve."""

    def read(self, name: str) -> Tensor:
        """Raises ``DamagedArtifact`` if it is gone."""

    def verify(self, name: str) -> None:
        """Raises ``DamagedArtifact`` if it is not what it was."""


@dataclass
class Challenge:
    """One nonce, and what honest workers answer to it. Its methods may run in any thread.

    Attributes:
        tensors: what is asked about.
        artifact: forms digests that are not known; None where there is none to read.
        digests: known ones; in place of one, words for why no worker can have it right.
    """

    tensors: TensorShapes
    artifact: TensorReader | None = None
    digests: dict[SliceOf, str] = field(default_factory=dict)
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))

    def __post_init__(self) -> None:
        self._forming = threading.Lock()

    def learn(self, digests: Mapping[str, str]) -> None:
        """Takes digests of whole tensors, formed while they were written."""
        for name, digest in digests.items():
            dtype, shape = self.tensors[name]
            self.digests[name, whole_slice(DTYPES[dtype], shape)] = digest

    def prepare(self, expected: Iterable[SliceOf]) -> None:
        """Forms what answers are expected to hold, where there is an artifact to form it from."""
        if self.artifact is not None:
            self.form(part for part in expected if part[0] in self.tensors)

    def form(self, wanted: Iterable[SliceOf]) -> None:
        """Forms the digests of ``wanted``, each once; of all tensors it takes as long as a sync.

        Raises ``UnknownSlices``, and ``DamagedArtifact`` if a file is gone.
        """
        with self._forming:
            for name, part in wanted:
                if (name, part) in self.digests:
                    continue
                if self.artifact is None:
                    raise UnknownSlices(f"{name}: its slices are others than any endpoint's before")
                numbers = _box(self.artifact.read(name), part)
                self.digests[name, part] = _converted_digest(numbers, part, self.nonce)

    def damage(self) -> str | None:
        """What is wrong with the artifact; None if it is as it was written, or not here."""
        if self.artifact is None:
            return None
        try:
            for name in self.tensors:
                self.artifact.verify(name)
        except DamagedArtifact as error:
            return str(error)
        return None

    def check(self, proofs: Sequence[WorkerProof]) -> Findings:
        """Compares what the workers of one endpoint answered with the artifact. Raises as ``form``.

        ``DamagedArtifact`` also if the host's copy is to blame for a difference.
        """
        wrong: list[dict[str, str]] = [dict(proof.problems) for proof in proofs]
        for problems, proof in zip(wrong, proofs, strict=True):
            problems |= dict.fromkeys(proof.slices.keys() - self.tensors, "was not asked for")
        uncovered = []
        for name, (_, shape) in self.tensors.items():
            answers = [proof.slices.get(name, ()) for proof in proofs]
            try:
                parts = _different_slices(answers, shape)
            except MalformedAnswer as error:
                wrong[0].setdefault(name, str(error))
                continue
            self.form((name, part) for part in parts)
            for problems, answer in zip(wrong, answers, strict=True):
                if problem := self._difference(name, answer):
                    problems.setdefault(name, problem)
            if not _cover(parts, shape):
                uncovered.append(name)
        return Findings(wrong, uncovered)

    def _difference(self, name: str, answer: Sequence[ServedSlice]) -> str | None:
        """The first slice of a worker that is not the artifact's, in words."""
        for served in answer:
            part, expected = served.slice, self.digests[name, served.slice]
            if served.digest == expected:
                continue
            if self.artifact is not None:
                self.artifact.verify(name)  # before anybody else is blamed
            _, shape = self.tensors[name]
            box = f"{list(part.sizes)} from {list(part.starts)}: " * (part.sizes != tuple(shape))
            if not HASH.fullmatch(expected):
                return f"{served.copy[:100]}{box}{expected}"
            return f"{served.copy[:100]}{box}checksum {served.digest[:64]}, expected {expected}"
        return None


def shapes_of(chunks: Iterable[Chunk]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a question says of an artifact's tensors: dtype and shape by name, in its order."""
    return {e.name: (DTYPE_NAMES[e.dtype], e.shape) for chunk in chunks for e in chunk.entries}


def answers_digest(proofs: Sequence[WorkerProof]) -> str:
    """Identity of what all workers have answered: blake3 over it, 64 hex digits."""
    digest = blake3()
    for worker, proof in enumerate(proofs):
        for name in sorted(proof.slices):
            for served in proof.slices[name]:
                part = served.slice
                form = (worker, name, [*part.starts], [*part.sizes], part.dtype, part.flushed)
                digest.update(f"{form}\0{served.copy}\0{served.digest}\n".encode())
    return digest.hexdigest()


def _box(tensor: Tensor, part: Slice) -> Tensor:
    ranges = zip(part.starts, part.sizes, strict=True)
    return tensor[tuple(slice(start, start + size) for start, size in ranges)]


def _converted_digest(numbers: Tensor, part: Slice, nonce: bytes) -> str:
    """In the dtype in which they are served, which has to hold them exactly."""
    served = numbers.to(DTYPES[part.dtype])
    if served.dtype != numbers.dtype and not served.to(numbers.dtype).equal(numbers):
        return (
            f"is rounded from {numbers.dtype} to {served.dtype}; start the server with the "
            "trainer's --dtype"
        )
    return slice_digest(served, nonce, flushed=part.flushed)


def _different_slices(
    answers: Iterable[Sequence[ServedSlice]], shape: Sequence[int]
) -> dict[Slice, None]:
    """Those that workers name of a tensor of ``shape``. Raises ``MalformedAnswer``."""
    found: dict[Slice, None] = {}
    volume = 0
    for answer in answers:
        for served in answer:
            part = served.slice
            if part in found:
                continue
            if not _fits(part, shape):
                raise MalformedAnswer(f"of shape {list(shape)}, answers with {str(part)[:200]}")
            found[part] = None
            volume += prod(part.sizes)
            if len(found) > MOST_SLICES or volume > MOST_COPIES * prod(shape):
                raise MalformedAnswer("answers with more slices than workers can have")
    return found


def _fits(part: Slice, shape: Sequence[int]) -> bool:
    if part.dtype not in DTYPES or not len(part.starts) == len(part.sizes) == len(shape):
        return False
    ranges = zip(part.starts, part.sizes, shape, strict=True)
    return all(
        start >= 0 and start + size <= full and (size > 0 or size == full)
        for start, size, full in ranges
    )


def _cover(parts: Iterable[Slice], shape: Sequence[int]) -> bool:
    """Whether every number of a tensor is in one of its slices, all of which fit into it."""
    if prod(shape) == 0 or any(part.sizes == tuple(shape) for part in parts):
        return True
    boxes = [(part.starts, [a + b for a, b in zip(part.starts, part.sizes, strict=True)])
             for part in parts]  # fmt: skip
    edges = [
        np.unique([0, size, *(box[0][d] for box in boxes), *(box[1][d] for box in boxes)])
        for d, size in enumerate(shape)
    ]
    cells = [len(cuts) - 1 for cuts in edges]
    if prod(cells) > MOST_CELLS:
        return False
    is_shown = np.zeros(cells, bool)
    for starts, ends in boxes:
        place = (np.searchsorted(cuts, (start, end))
                 for cuts, start, end in zip(edges, starts, ends, strict=True))  # fmt: skip
        is_shown[tuple(slice(first, last) for first, last in place)] = True
    return bool(is_shown.all())
