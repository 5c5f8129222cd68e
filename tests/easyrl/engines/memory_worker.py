"""Measures what engines hold, in one or several processes; see ``test_engine_memory.py``.

Arguments: a folder with ``model``, and ``ZERO_STAGE-DTYPE[-offload]`` for each engine. Rank 0
leaves ``held.json``: by engine, bytes per parameter between the backward and the step.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from easyrl.config import Config
from easyrl.config.file import validate_config
from easyrl.engines.deepspeed.engine import DeepSpeedEngine, _numel
from easyrl.engines.process_group import start_process_group
from tests.easyrl.engines.engine_cases import denominator, streamed
from tests.easyrl.engines.held_memory import held_bytes, held_storages


def config(folder: Path, stage: int, dtype: str, offload: bool) -> Config:
    return validate_config(
        {
            "model": {"path": str(folder / "model"), "dtype": dtype},
            "data": {"files": [str(folder / "prompts.jsonl")]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "recipe": {"aggregation": "token", "kl_coef": 0.0},
            "trainer": {"zero_stage": stage, "offload_optimizer": offload},
        }
    )


def measure(folder: Path, case: str) -> float:
    """Bytes per parameter of the engine ``case``, in the second step: moments are there."""
    stage, dtype, *offload = case.split("-")
    before = held_storages()
    engine = DeepSpeedEngine(config(folder, int(stage), dtype, bool(offload)))
    row = streamed("token")[0]
    engine.forward_backward([row])
    engine.optimizer_step(denominator("token"))
    engine.forward_backward([row])
    engine._release_gathered()  # ZeRO-3 keeps what it gathers, up to a constant
    buckets = getattr(engine._engine.optimizer, "ipg_buckets", {})
    for bucket in buckets.values():  # of constant size, ``BUFFERED``
        one_or_more = bucket.buffer  # one with ZeRO-3, a list else
        for buffer in [one_or_more] if isinstance(one_or_more, torch.Tensor) else one_or_more:
            before[buffer.untyped_storage().data_ptr()] = 0
    num_parameters = sum(_numel(p) for p in engine._policy.parameters())
    held = held_bytes(engine._policy, before) / num_parameters
    engine._engine.destroy()
    return held


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    folder, *names = (a for a in sys.argv[1:] if not a.startswith("--local_rank"))
    start_process_group()
    results = {name: measure(Path(folder), name) for name in names}
    if dist.get_rank() == 0:
        (Path(folder) / "held.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
