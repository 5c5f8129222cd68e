"""Backend ``easyrl_nccl``: vLLM's NCCL broadcast for GPUs, with artifacts beside it.

Constructed and dispatched on a CPU in the tests; the broadcast itself, which is vLLM's own code,
has not been run here.
"""

from __future__ import annotations

from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from .beside import ArtifactsBeside


class EasyRLNCCLWeightTransferEngine(ArtifactsBeside, NCCLWeightTransferEngine):  # type: ignore[misc]
    """``{"backend": "easyrl_nccl"}``: what vLLM's ``nccl`` takes, and what ``easyrl`` takes."""
