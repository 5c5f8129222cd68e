"""Measures models that are split over processes; see ``test_measured_memory.py``.

Started by the ``deepspeed`` launcher with two processes. Arguments: a folder with the models of
``save_models``, and names of ``SPLIT_CASES``. Rank 0 leaves ``split.json``: of each case and rank
what ``memory_plan_worker.measure`` says, of ``NUM_ROWS`` rows in one call.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from easyrl.config import Config
from easyrl.engines.megatron.engine import MegatronEngine
from easyrl.engines.megatron.layout import Layout
from easyrl.engines.process_group import start_process_group
from tests.easyrl.engines.held_memory import held_bytes, held_storages
from tests.easyrl.memory_plan.live_bytes import largest_growth
from tests.easyrl.memory_plan.memory_cases import row
from tests.easyrl.memory_plan.memory_plan_worker import buckets
from tests.easyrl.memory_plan.split_cases import NUM_ROWS, split_config


def measure(settings: Config) -> dict[str, int]:
    """Of this rank; collective."""
    before = held_storages()
    engine = MegatronEngine(settings, Layout.of(settings.parallel, dist.get_world_size()))
    rows = [row()] * NUM_ROWS
    engine.begin_batch()
    engine.forward_backward(rows)
    engine.optimizer_step(float(NUM_ROWS * rows[0].num_loss_tokens))
    engine.forward_backward(rows)
    with largest_growth() as growth:
        engine.forward_backward(rows)
    held = held_bytes(engine._engine.module, before | buckets(engine._engine))
    engine._engine.destroy()
    parallel_state.destroy_model_parallel()
    return {"held": held, "running": growth[0]}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    folder, *names = (a for a in sys.argv[1:] if not a.startswith("--local_rank"))
    start_process_group()
    measured = {}
    for name in names:
        of_ranks: list[dict[str, int]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, measure(split_config(Path(folder), name)))
        measured[name] = of_ranks
    if dist.get_rank() == 0:
        (Path(folder) / "split.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()
