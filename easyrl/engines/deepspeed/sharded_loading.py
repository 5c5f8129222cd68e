"""Models that are built in shards, for ZeRO-3: no rank ever holds a whole one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
from torch import Tensor
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from easyrl.models.output_head import NoProjection
from easyrl.models.policy_model import PolicyModel


@contextmanager
def sharded_loading(settings: dict[str, Any]) -> Iterator[None]:
    """Inside, ``from_pretrained`` builds a model under ``deepspeed.zero.Init``. Collective.

    Each parameter is cut into the ranks' shards when it is made; rank 0 reads the files, one weight
    is whole at a time. ``settings`` are DeepSpeed's, of ZeRO-3, as the model is initialised with
    afterwards.
    """
    hf_config = HfDeepSpeedConfig(settings)  # transformers looks for it, and holds it weakly
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del hf_config


def take_projection(model: PolicyModel) -> tuple[Tensor, Tensor | None]:
    """Weight [V, H] and bias [V] of ``model``'s projection, whole on every rank; it has none then.

    Of a model in shards they are copies, else its own. Collective.
    """
    head: Any = model.model.get_output_embeddings()
    own = [parameter for parameter in (head.weight, head.bias) if parameter is not None]
    is_sharded = hasattr(head.weight, "ds_id")
    with deepspeed.zero.GatheredParameters(own) if is_sharded else nullcontext():
        taken = [p.detach().clone() if is_sharded else p.detach() for p in own]
    model.model.set_output_embeddings(NoProjection())
    return taken[0], taken[1] if len(taken) > 1 else None
