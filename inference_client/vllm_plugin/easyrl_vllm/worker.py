"""What is added to vLLM's worker class: the route by which the trainer asks for a proof."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from .engine import EasyRLWeightTransferEngine


class WeightProof:
    """A worker extension (``--worker-extension-cls easyrl_vllm.WeightProof``)."""

    if TYPE_CHECKING:  # the worker's own
        weight_transfer_engine: EasyRLWeightTransferEngine
        vllm_config: VllmConfig
        _weight_update_active: bool

    def easyrl_prove_weights(self, artifact: str, chunks: str) -> dict[str, Any]:
        """Compares what this worker serves with an artifact, bit by bit.

        ``chunks``: JSON text of the artifact's chunks, as in ``/update_weights``. Returns
        ``{"checksums": {name: blake3}, "problems": {name: text}, "transport": "file" | "http"}``:
        a tensor is in ``checksums`` if this worker serves it, or its shard of it, to the bit. With
        several workers a tensor that another one serves is in neither. Raises ``ValueError`` if the
        artifact cannot be read, if it has other hashes, and while an update is open.
        """
        from .proof import prove

        if self._weight_update_active:
            raise ValueError("a weight update is open; finish or abandon it before the proof")
        engine = self.weight_transfer_engine
        receiver = engine.opened_receiver()
        result = prove(engine.model, self.vllm_config, receiver, artifact, json.loads(chunks))
        return asdict(result) | {"transport": receiver.transport}
