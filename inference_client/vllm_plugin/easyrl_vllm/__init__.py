"""EasyRL inside vLLM: weight updates from verified artifacts, and proof of what is served.

vLLM finds ``register`` through its entry point. A server is started with ``--weight-transfer-config
'{"backend": "easyrl"}' --worker-extension-cls easyrl_vllm.WeightProof`` and, for the routes,
``VLLM_SERVER_DEV_MODE=1``. Nothing here imports vLLM before vLLM does: the trainer's environment
imports ``receiving`` from this folder.
"""

from __future__ import annotations

from .worker import WeightProof

__all__ = ["WeightProof", "register"]

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
