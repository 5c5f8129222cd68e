"""Backend ``easyrl_nccl``: vLLM's NCCL broadcast for GPUs, and artifacts as well.

Constructed and dispatched on a CPU in the tests; the broadcast itself, which is vLLM's own code,
has not been run here.
"""

from __future__ import annotations

from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from .engine import ArtifactMixin


class EasyRLNCCLWeightTransferEngine(ArtifactMixin, NCCLWeightTransferEngine):  # type: ignore[misc]
    """``{"backend": "easyrl_nccl"}``: what vLLM's ``nccl`` takes, and what ``easyrl`` takes."""
