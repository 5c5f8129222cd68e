"""The digest of an engine's weights where no endpoint is given them."""

from __future__ import annotations

from easyrl.engines.base import TrainEngine
from easyrl.inference_client.transfer.artifact import Chunk, tensor_checksum, weights_digest
from easyrl.runtime.collectives import Collectives


def digest_of_weights(engine: TrainEngine, collectives: Collectives) -> str:
    """What a certificate would say of them, 64 hex digits; on every rank. Collective."""
    checksums = {}
    for name, weight in engine.named_weights():
        if collectives.ranks.rank == 0:
            checksums[name] = tensor_checksum(weight)
    digest: str = collectives.broadcast(weights_digest([Chunk("", 0, checksums)]))
    return digest
