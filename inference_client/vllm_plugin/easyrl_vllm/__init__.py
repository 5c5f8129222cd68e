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

    from .adapters import AdapterStore
    from .engine import EasyRLWeightTransferEngine
    from .proof import Proof

ENGINES = {
    "easyrl": ("easyrl_vllm.engine", "EasyRLWeightTransferEngine"),
    "easyrl_nccl": ("easyrl_vllm.nccl", "EasyRLNCCLWeightTransferEngine"),
    "easyrl_hccl": ("easyrl_vllm.hccl", "EasyRLHCCLWeightTransferEngine"),
}


def register() -> None:
    """Makes the weight-transfer backends known, and has the engine core refuse unproved weights.

    Called in each of vLLM's processes, or twice.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from .core_guard import guard_engine_core
    from .replies import keep_replies_in_step

    for backend, (module, name) in ENGINES.items():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, module, name)
    keep_replies_in_step()
    guard_engine_core()


class WeightProof:
    """A worker extension (``--worker-extension-cls easyrl_vllm.WeightProof``)."""

    if TYPE_CHECKING:  # the worker's own
        weight_transfer_engine: EasyRLWeightTransferEngine
        vllm_config: VllmConfig
        model_runner: Any
        _weight_update_active: bool

    def easyrl_prove_weights(self, nonce: str, tensors: str) -> dict[str, Any]:
        """Digests of what this worker serves, keyed with ``nonce`` (64 hex digits).

        ``tensors``: JSON text, ``{name: [dtype, shape]}`` of a checkpoint, by safetensors' names.
        Returns ``{"slices": {name: [slice]}, "problems": {name: text}, "transport": "file" |
        "http"}``, a slice as ``ServedSlice`` has it. What another worker serves is in neither.
        Raises ``ValueError`` while an update is open and before a trainer has announced itself.
        """
        from .adapter_proof import without_adapters
        from .keyed_digests import parse_nonce
        from .proof import prove

        if self._weight_update_active:
            raise ValueError("a weight update is open; finish or abandon it before the proof")
        engine = self.weight_transfer_engine
        receiver = engine.opened_receiver()
        asked = json.loads(tensors)
        with without_adapters(engine.model):
            result = prove(engine.model, self.vllm_config, parse_nonce(nonce), asked)
        if asked:
            receiver.provable = result.bit_for_bit()
        return self._told(result)

    def easyrl_compare_shapes(self, tensors: str) -> dict[str, Any]:
        """``{"problems": {name: text}}``: which of ``tensors`` this worker could not load, and why.

        ``tensors`` as in ``easyrl_prove_weights``. Reads and changes nothing; no trainer needs to
        have announced itself.
        """
        from .adapter_proof import without_adapters
        from .shapes import shape_problems

        model = self.weight_transfer_engine.model
        with without_adapters(model):
            return {"problems": shape_problems(model, self.vllm_config, json.loads(tensors))}

    def easyrl_adapter_limits(self) -> dict[str, Any]:
        """What adapters this worker takes (``adapters.adapter_limits``)."""
        from .adapters import adapter_limits

        return adapter_limits(self.model_runner)

    def easyrl_receive_adapter(self, update: str) -> dict[str, Any]:
        """Takes chunks of an adapter; ``update``: JSON text (``AdapterStore.receive``).

        vLLM loads it afterwards, by /v1/load_lora_adapter with the path ``easyrl:`` and its name.
        """
        receiver = self.weight_transfer_engine.opened_receiver()
        self._adapters().receive(receiver, json.loads(update))
        return {"transport": receiver.transport}

    def easyrl_prove_adapter(self, nonce: str, adapter: str, tensors: str) -> dict[str, Any]:
        """As ``easyrl_prove_weights``, of the tensors of ``adapter`` as its layers hold them.

        What the model itself serves is not in the answer.
        """
        from .keyed_digests import parse_nonce

        alone = self.vllm_config.parallel_config.world_size == 1
        asked = json.loads(tensors)
        return self._told(self._adapters().prove(adapter, parse_nonce(nonce), asked, alone=alone))

    def _told(self, result: Proof) -> dict[str, Any]:
        receiver = self.weight_transfer_engine.opened_receiver()
        return asdict(result) | {"transport": receiver.transport}

    def _adapters(self) -> AdapterStore:
        """Those that have come. Raises ``ValueError`` if the server takes none."""
        from .adapters import AdapterStore, adapter_limits

        if not hasattr(self, "_easyrl_adapters"):
            if (problem := adapter_limits(self.model_runner)["problem"]) is not None:
                raise ValueError(f"this server takes no adapters: it {problem}")
            self._easyrl_adapters = AdapterStore(self.model_runner.lora_manager)
        return self._easyrl_adapters
