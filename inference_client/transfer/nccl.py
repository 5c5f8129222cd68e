"""NCCL broadcast from the trainer's GPU to vLLM's (``--weight-transfer-config '{"backend":
"nccl"}'``), packed, by vLLM's own trainer-side engine.

It needs vLLM importable in the trainer's environment, of the servers' version. Tested against
vLLM 0.32's classes without a GPU: the source, the client and the order of the calls. The broadcast
itself has not been run.
"""

from __future__ import annotations

from collections.abc import Sequence

from easyrl.inference_client.transfer.broadcast import (
    Broadcast,
    EndpointsClient,
    SentWeights,
    WeightMeta,
)


def open_nccl(
    metadata: Sequence[WeightMeta],
    client: EndpointsClient,
    *,
    master_address: str,
    master_port: int,
    buffer_bytes: int,
) -> Broadcast:
    """Joins the trainer's rank 0 and the endpoints in one NCCL group; called on rank 0.

    The calling thread's current device is the sender's.

    Args:
        metadata: of what will be sent.
        client: of all endpoints, which were started with backend ``easyrl_nccl``.
        master_address, master_port: of rank 0, as the endpoints reach it; a free port.
        buffer_bytes: of each of the two packed buffers on the sender's and receivers' devices.

    Raises ``ValueError`` if vLLM is not installed here or is too old, ``RuntimeError`` if an
    endpoint refuses.
    """
    try:
        from vllm.distributed.weight_transfer.base import WeightSource
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )
    except ImportError as error:
        raise ValueError(
            "weight_sync.transport: nccl needs vLLM 0.29 or newer in the trainer's environment "
            f"({error}); install it, or use transport auto"
        ) from None
    WeightSource.register(SentWeights)
    init_info = NCCLTrainerInitInfo(
        rank=0,
        master_address=master_address,
        master_port=master_port,
        world_size=1 + client.num_workers,
        packed_buffer_size_bytes=buffer_bytes,
    )
    return Broadcast(NCCLTrainerWeightTransferEngine, init_info, metadata, client)
