"""Models that are built in shards, for ZeRO-3: no rank ever holds a whole one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config


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
