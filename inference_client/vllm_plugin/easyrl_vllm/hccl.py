"""Backend ``easyrl_hccl``: vllm-ascend's HCCL broadcast for NPUs, and artifacts as well.

Untested: vllm-ascend cannot be imported without an NPU's libraries. Written against its main branch
of October 2026, which registers the engine below as ``hccl``; it has to be one whose engines own
start, update and finish (vllm-ascend pull request 12876).
"""

from __future__ import annotations

from vllm_ascend.distributed.weight_transfer.hccl_engine import HCCLWeightTransferEngine

from .engine import ArtifactMixin


class EasyRLHCCLWeightTransferEngine(ArtifactMixin, HCCLWeightTransferEngine):  # type: ignore[misc]
    """``{"backend": "easyrl_hccl"}``: what vllm-ascend's ``hccl`` takes, and ``easyrl`` too."""
