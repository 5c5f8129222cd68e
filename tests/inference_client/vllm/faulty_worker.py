"""A worker extension with faults to plant; imported by vLLM's workers, not by the tests."""

from __future__ import annotations

import torch
from easyrl_vllm import WeightProof
from easyrl_vllm.proof import is_packed, read_packed
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm


class FaultyWorker(WeightProof):
    """``/collective_rpc`` methods that tests call; arguments are text, as vLLM passes them."""

    def fault_keep_head(self) -> bool:
        """Remembers what the output projection multiplies with; says whether that is packed."""
        head = self._layer("lm_head")
        self._kept_head = head.cpu_linear, head.weight.detach().clone()
        return is_packed(head, head.weight)

    def fault_stale_head(self) -> None:
        """Puts the remembered one back, as vLLM's own reload leaves it with tied embeddings."""
        head = self._layer("lm_head")
        head.cpu_linear, weight = self._kept_head
        if not is_packed(head, weight):
            head.weight.data.copy_(weight)

    def fault_change(self, layer: str, delta: str) -> None:
        """Adds ``delta`` to one number of the layer's weight, as it is served."""
        module = self._layer(layer)
        if module.weight.numel():
            module.weight.data.view(-1)[3] += float(delta)
            return
        shape = (sum(module.output_partition_sizes), module.input_size_per_partition)
        packed = read_packed(module, torch.empty(shape, dtype=module.weight.dtype, device="meta"))
        packed[2, 1] += float(delta)
        module.weight = torch.nn.Parameter(packed, requires_grad=False)
        dispatch_cpu_unquantized_gemm(module, remove_weight=True)

    def fault_addresses(self) -> list[int]:
        """Where the served tensors lie."""
        return [p.data_ptr() for p in self.model_runner.get_model().parameters()]

    def fault_keep_adapter(self, keeps: str) -> None:
        """While it ``keeps`` (yes or no), a new adapter gets a slot that still holds the last."""
        for layer in self.model_runner.lora_manager._adapter_manager.modules.values():
            for name in ("set_lora", "reset_lora"):
                if keeps == "yes":
                    setattr(layer, name, lambda *arguments: None)
                else:
                    layer.__dict__.pop(name, None)

    def _layer(self, name: str) -> torch.nn.Module:
        return self.model_runner.get_model().get_submodule(name)
