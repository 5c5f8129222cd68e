"""Right answers to recorded proofs, formed again while the weights are still on this host."""

from __future__ import annotations

from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file

from easyrl.inference_client.client import WorkerProof
from easyrl.inference_client.transfer.artifact import MANIFEST, tensor_checksum, weights_digest
from easyrl.inference_client.vllm_plugin.easyrl_vllm.chunk_format import Chunk
from easyrl.inference_client.vllm_plugin.easyrl_vllm.keyed_digests import slice_digest, whole_slice
from easyrl.inference_client.vllm_plugin.easyrl_vllm.slices import ServedSlice
from easyrl.runtime.run_files import CONFIG_FILE
from easyrl.schema import APART, PolicyVersion, WeightProof
from easyrl.weight_sync.challenge import answers_digest


class _Directory(msgspec.Struct):
    directory: str | None = None


class _Settings(msgspec.Struct):
    weight_sync: _Directory = msgspec.field(default_factory=_Directory)


class RecomputedAnswers:
    """Looks for a version's artifact where the run's newest settings put it (``AnswersOf``).

    It is there while the version is served, and after a kill. Answers in slices are not formed
    again: which they were is not recorded.
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory: Path | None = None
        try:
            settings = msgspec.yaml.decode((run_dir / CONFIG_FILE).read_bytes(), type=_Settings)
        except (OSError, msgspec.MsgspecError):
            return
        if settings.weight_sync.directory is not None:
            self._directory = Path(settings.weight_sync.directory)

    def __call__(self, version: str, weights: str, proof: WeightProof) -> str | None:
        """Digest of the right answers for ``weights`` of ``version``; None without an artifact."""
        if self._directory is None or not proof.whole:
            return None
        run = PolicyVersion.parse(version).run
        for folder in self._directory.glob(f"easyrl-{run}*/{version.replace(':', '-')}"):
            try:
                if (slices := _slices(folder, weights, proof.nonce)) is not None:
                    return answers_digest([WorkerProof(slices, {}, "")])
            except (OSError, SafetensorError, msgspec.MsgspecError):  # it goes, or is being written
                continue
        return None


class _Manifest(msgspec.Struct):
    chunks: list[dict[str, object]]


def _slices(folder: Path, weights: str, nonce: str) -> dict[str, list[ServedSlice]] | None:
    """Keyed digests of an artifact with the digest ``weights``; None if it has another.

    Of an adapter the digest is that of the model below it, too, which lies beside it.
    """
    chunks = _chunks(folder)
    below: list[list[Chunk]] = [[]]
    if weights.startswith(APART):
        bases = [base for base in folder.parent.glob("*-base") if (base / MANIFEST).is_file()]
        below = [_chunks(base) for base in bases]
    if not any(weights_digest([*base, *chunks]) == weights.removeprefix(APART) for base in below):
        return None
    slices = {}
    for chunk in chunks:
        for name, tensor in load_file(folder / chunk.file).items():
            if tensor_checksum(tensor) != chunk.checksums.get(name):
                return None
            whole = whole_slice(tensor.dtype, tensor.shape)
            slices[name] = [ServedSlice(whole, slice_digest(tensor, bytes.fromhex(nonce)))]
    return slices


def _chunks(folder: Path) -> list[Chunk]:
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Manifest)
    return [Chunk.parse(chunk) for chunk in manifest.chunks]
