"""Measures real engines in a process of its own; see ``test_measured_memory.py``.

Arguments: a folder with the models of ``save_models``, and names of ``CASES``. Leaves
``measured.json``: of each case the bytes that are held between a backward and the step, and the
most that a micro-batch allocates beside them.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from easyrl.config import Config
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.engines.process_group import start_process_group
from tests.easyrl.engines.held_memory import Storages, held_bytes, held_storages
from tests.easyrl.memory_plan.live_bytes import largest_growth
from tests.easyrl.memory_plan.memory_cases import config, row

KL = {"kl_coef": 0.1}
Sections = dict[str, dict[str, Any]]


def _case(dtype: str, mode: str, stage: int, **more: dict[str, Any]) -> Sections:
    model = {"dtype": dtype, "activation_checkpointing": mode} | more.pop("model", {})
    return {"model": model, "trainer": {"zero_stage": stage} | more.pop("trainer", {})} | more


# by name: the model, and the sections
CASES: dict[str, tuple[str, Sections]] = {
    "fp32": ("tied", _case("fp32", "none", 0)),
    "fp32-layer": ("untied", _case("fp32", "layer", 0)),
    "fp32-selective": ("tied", _case("fp32", "selective", 0)),
    "bf16": ("tied", _case("bf16", "none", 1)),
    "bf16-layer": ("untied", _case("bf16", "layer", 1)),
    "bf16-selective": ("tied", _case("bf16", "selective", 1)),
    "every-second": ("tied", _case("fp32", "layer", 0, model={"checkpoint_every": 2})),
    "vocabulary": ("wide", _case("fp32", "layer", 0)),
    "vocabulary-bf16": ("wide", _case("bf16", "layer", 1)),
    "recompute": ("wide", _case("fp32", "layer", 0, model={"logprob_backward": "recompute"})),
    "models": ("untied", _case("bf16", "none", 2, recipe=KL, trainer={"updates_per_batch": 2})),
    "adapter": ("untied", _case("bf16", "layer", 1, recipe=KL, model={"lora": {"rank": 8}})),
    "mixture": ("mixture", _case("fp32", "none", 0)),
}


def case_config(folder: Path, name: str) -> Config:
    model, sections = CASES[name]
    return config(folder / model, **sections)


def buckets(engine: deepspeed.DeepSpeedEngine) -> Storages:
    """DeepSpeed's buffers of constant size, ``BUFFERED``."""
    some = getattr(engine.optimizer, "ipg_buckets", {}).values()
    buffers = [buffer.untyped_storage() for bucket in some for buffer in bucket.buffer]
    return {storage.data_ptr(): storage for storage in buffers}


def measure(settings: Config) -> dict[str, int]:
    """In the second step: moments are there, and the checks of a first use are over."""
    before = held_storages()
    engine, micro_batch = DeepSpeedEngine(settings), row()
    engine.begin_batch()
    engine.forward_backward([micro_batch])
    engine.optimizer_step(float(micro_batch.num_loss_tokens))
    engine.forward_backward([micro_batch])
    with largest_growth() as growth:
        engine.forward_backward([micro_batch])
    held = held_bytes(engine._policy, before | buckets(engine._engine))
    engine._engine.destroy()
    return {"held": held, "running": growth[0]}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    start_process_group()
    folder = Path(sys.argv[1])
    measured = {name: measure(case_config(folder, name)) for name in sys.argv[2:]}
    (folder / "measured.json").write_text(json.dumps(measured))
    dist.destroy_process_group()
