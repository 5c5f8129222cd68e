"""EasyRL inside vLLM: weight updates from verified artifacts, and proof of what is served.

vLLM finds ``register`` through its entry point. A server is started with ``--weight-transfer-config
'{"backend": "easyrl"}' --worker-extension-cls easyrl_vllm.WeightProof`` and, for the routes,
``VLLM_SERVER_DEV_MODE=1``. Nothing here imports vLLM before vLLM does: the trainer's environment
imports ``receiving`` from this folder.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from .engine import EasyRLWeightTransferEngine

ENGINES = {
    "easyrl": ("easyrl_vllm.engine", "EasyRLWeightTransferEngine"),
    "easyrl_nccl": ("easyrl_vllm.nccl", "EasyRLNCCLWeightTransferEngine"),
    "easyrl_hccl": ("easyrl_vllm.hccl", "EasyRLHCCLWeightTransferEngine"),
}


def register() -> None:
    """Makes the weight-transfer backends known; called in each of vLLM's processes, or twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from .replies import keep_replies_in_step

    for backend, (module, name) in ENGINES.items():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, module, name)
    keep_replies_in_step()


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
