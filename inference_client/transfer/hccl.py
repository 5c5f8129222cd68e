"""HCCL broadcast from the trainer's NPU to vLLM-Ascend's, by vllm-ascend's trainer-side engine.

Untested: written against vllm-ascend's documentation and sources without an NPU. Its guide on RL
names the server's option ``--weight-transfer-config '{"backend": "nccl"}'``, which means HCCL
there. The trainer-side class is the one that mirrors vLLM's since vllm-ascend's pull request 16960;
releases before it have static functions instead and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from easyrl.inference_client.transfer.broadcast import (
    Broadcast,
    EndpointsClient,
    SentWeights,
    WeightMeta,
)


def open_hccl(
    metadata: Sequence[WeightMeta],
    client: EndpointsClient,
    *,
    master_address: str,
    master_port: int,
    buffer_bytes: int,
) -> Broadcast:
    """As ``open_nccl``, on Ascend.

    Raises ``ValueError`` if vllm-ascend is not installed here or has no such engine.
    """
    try:
        from vllm.distributed.weight_transfer.base import WeightSource
        from vllm_ascend.distributed.weight_transfer.hccl_engine import (
            HCCLTrainerInitInfo,
            HCCLTrainerWeightTransferEngine,
        )
    except ImportError as error:
        raise ValueError(
            "weight_sync.transport: hccl needs a vllm-ascend with HCCLTrainerWeightTransferEngine "
            f"in the trainer's environment ({error}); install it, or use transport auto"
        ) from None
    WeightSource.register(SentWeights)
    init_info = HCCLTrainerInitInfo(
        rank=0,
        master_address=master_address,
        master_port=master_port,
        world_size=1 + client.num_workers,
        packed=True,
        packed_buffer_size_bytes=buffer_bytes,
    )
    return Broadcast(HCCLTrainerWeightTransferEngine, init_info, metadata, client)
