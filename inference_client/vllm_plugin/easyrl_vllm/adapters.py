"""LoRA adapters in a vLLM worker: received as artifacts and loaded by name, from no folder.

vLLM loads an adapter from a path that its server is told. Here ``PREFIX`` and a name take the
path's place, and lead to tensors that the trainer has sent to this worker before. These are ``A``
and ``alpha / rank · B``: vLLM folds the scaling into ``B`` as it loads one, and so there is nothing
left to fold, and the numbers that are served are those that were sent, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from vllm import envs
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from .adapter_proof import prove_adapter, rename_mapper
from .proof import Proof
from .receiving import WeightReceiver

PREFIX = "easyrl:"
# The one that is served and the one before: a request that was queued behind a pause with the
# latter's name may yet be scheduled, and vLLM's engine ends when an adapter cannot be loaded then.
NUM_KEPT = 2


@dataclass
class ReceivedAdapter:
    """What has come of one adapter."""

    rank: int
    tensors: dict[str, Tensor] = field(default_factory=dict)  # by peft's names, on the CPU
    request: LoRARequest | None = None  # vLLM's, once it was loaded


class AdapterStore:
    """The adapters of one worker, on their way into vLLM's LoRA layers."""

    def __init__(self, manager: WorkerLoRAManager) -> None:
        self._manager = manager
        self._load_from_folder = manager._load_adapter
        manager._load_adapter = self._load  # type: ignore[method-assign]
        self._received: dict[str, ReceivedAdapter] = {}  # by name, the oldest first

    def receive(self, receiver: WeightReceiver, update: Mapping[str, Any]) -> None:
        """Takes some chunks of an adapter, each verified by its announced hashes.

        ``update``: ``{"adapter": name, "rank": int, "begins": bool, "artifact": str, "chunks":
        [...]}``; the first of an adapter ``begins`` it. Raises ``ValueError`` for a rank that the
        server has no room for, for a tensor that came before, and for what ``receiver`` refuses.
        """
        name, rank = update["adapter"], update["rank"]
        if update["begins"]:
            most = self._manager.lora_config.max_lora_rank
            if rank > most:
                raise ValueError(f"adapter {name!r}: rank {rank} is above --max-lora-rank {most}")
            self._received.pop(name, None)
            while len(self._received) >= NUM_KEPT:
                del self._received[next(iter(self._received))]
            self._received[name] = ReceivedAdapter(rank)
        if (adapter := self._received.get(name)) is None:
            raise ValueError(f"adapter {name!r}: its first chunks have not come")
        for tensor_name, tensor in receiver.tensors(update["artifact"], update["chunks"]):
            if tensor_name in adapter.tensors:
                raise ValueError(f"adapter {name!r}: {tensor_name!r} came twice")
            adapter.tensors[tensor_name] = tensor.clone()  # the receiver's buffer is used again

    def prove(
        self, name: str, nonce: bytes, tensors: Mapping[str, Sequence[Any]], *, alone: bool
    ) -> Proof:
        """What the LoRA layers hold of ``tensors`` in the slot of adapter ``name``.

        ``alone``: no other worker serves a part of the model.
        """
        adapter = self._received.get(name)
        if adapter is None or adapter.request is None:
            return Proof(problems=dict.fromkeys(tensors, f"adapter {name!r} was never loaded"))
        manager, lora_id = self._manager._adapter_manager, adapter.request.lora_int_id
        if lora_id not in manager.lora_index_to_id:
            # a stranger's adapter took its slot: as for a request that names it
            self._manager.add_adapter(adapter.request)
        return prove_adapter(manager, lora_id, nonce, tensors, alone=alone)

    def _load(self, request: LoRARequest) -> LoRAModel:
        """Stands in for ``WorkerLoRAManager._load_adapter``."""
        if not request.lora_path.startswith(PREFIX):
            return self._load_from_folder(request)
        name = request.lora_path.removeprefix(PREFIX)
        if (adapter := self._received.get(name)) is None:
            raise ValueError(f"adapter {name!r} was not received, or is no longer kept")
        _refuse_incomplete(name, adapter.tensors)
        manager = self._manager._adapter_manager
        helper = PEFTHelper(r=adapter.rank, lora_alpha=adapter.rank, target_modules=[])
        lora = LoRAModel.from_lora_tensors(
            request.lora_int_id,
            adapter.tensors,
            helper,
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            weights_mapper=rename_mapper(manager),
        )
        parts = adapted_parts(manager)
        if unknown := [module for module in lora.loras if module not in parts]:
            raise ValueError(
                f"adapter {name!r}: {len(unknown)} of its layers can have no adapter here, first "
                f"{unknown[0]}; leave them out of model.lora.target_modules"
            )
        adapter.request = request
        return lora


def adapter_limits(model_runner: Any) -> dict[str, Any]:
    """What adapters a worker takes: ``{"max_rank", "modules", "problem"}``.

    ``modules``: last parts of the names of the layers that can have one. ``problem``: why it takes
    none, with the flag that is missing; else None.
    """
    manager = getattr(model_runner, "lora_manager", None)
    if manager is None:
        missing = "was started without --enable-lora"
        return {"max_rank": 0, "modules": [], "problem": missing}
    missing = "was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
    names = {part.rpartition(".")[2] for part in adapted_parts(manager._adapter_manager)}
    rank = manager.lora_config.max_lora_rank
    problem = None if envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING else missing
    return {"max_rank": rank, "modules": sorted(names), "problem": problem}


def adapted_parts(manager: Any) -> set[str]:
    """Layers of a checkpoint that can have an adapter; a packed layer stands for its parts."""
    return {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}


def _refuse_incomplete(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises ``ValueError`` if a layer has only one of its two factors, or none has any."""
    pairs = (".lora_A.", ".lora_B."), (".lora_B.", ".lora_A.")
    for tensor in tensors:
        if not any(a in tensor and tensor.replace(a, b) in tensors for a, b in pairs):
            raise ValueError(f"adapter {name!r}: {tensor} came without its other factor")
    if not tensors:
        raise ValueError(f"adapter {name!r} is empty")
