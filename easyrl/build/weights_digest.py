"""The digest of an engine's weights where no endpoint is given them."""

from __future__ import annotations

from itertools import chain

from easyrl.config import LoraConfig
from easyrl.engines.base import TrainEngine
from easyrl.inference_client.transfer.artifact import Chunk, tensor_checksum, weights_digest
from easyrl.runtime.collectives import Collectives
from easyrl.schema import APART
from easyrl.weight_sync.adapter import served_adapter


def digest_of_weights(
    engine: TrainEngine, collectives: Collectives, lora: LoraConfig | None = None
) -> str:
    """What a certificate would say of them; on every rank. Collective.

    ``lora``: they are served as the model without adapters, and an adapter of this form.
    """
    weights = engine.named_weights()
    if lora is not None:
        weights = chain(engine.named_weights("base"), served_adapter(engine, lora))
    checksums = {}
    for name, weight in weights:
        if collectives.ranks.rank == 0:
            checksums[name] = tensor_checksum(weight)
    form = "" if lora is None else APART
    digest: str = collectives.broadcast(form + weights_digest([Chunk("", 0, checksums)]))
    return digest
