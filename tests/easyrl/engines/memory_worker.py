"""Measures what engines hold, in one or several processes; see ``test_engine_memory.py``.

Arguments: a folder with ``model`` and ``large``, and by case ``ZERO_STAGE-DTYPE[-offload]``,
``ZERO_STAGE-DTYPE-OPTIMIZER`` or ``load``. Rank 0 leaves ``held.json``: of an engine, bytes per
parameter between the backward and the step; of ``load``, each rank's largest private memory while
an engine with ZeRO-3 and a reference is made, in bytes per parameter of one model.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from easyrl.config import Config
from easyrl.config.file import validate_config
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.engines.deepspeed.initialise import num_elements
from easyrl.engines.process_group import start_process_group
from easyrl.models.loading import load_policy_model
from easyrl.models.policy_model import PolicyModel
from easyrl.runtime.collectives import Collectives
from tests.easyrl.engines.engine_cases import denominator, streamed
from tests.easyrl.engines.held_memory import held_bytes, held_storages


def config(
    folder: Path, stage: int, dtype: str, special: str, model: str = "model", kl_coef: float = 0.0
) -> Config:
    """``special``: empty, ``offload`` or an optimizer."""
    optimizer = special if special in ("adam8bit", "muon") else "adamw"
    return validate_config(
        {
            "model": {"path": str(folder / model), "dtype": dtype},
            "data": {"files": [str(folder / "prompts.jsonl")]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "recipe": {"aggregation": "token", "kl_coef": kl_coef},
            "trainer": {
                "zero_stage": stage,
                "offload_optimizer": special == "offload",
                "optimizer": optimizer,
            },
        }
    )


def measure(folder: Path, case: str) -> float:
    """Bytes per parameter of the engine ``case``, in the second step: moments are there."""
    stage, dtype, *special = case.split("-")
    before = held_storages()
    engine = DeepSpeedEngine(config(folder, int(stage), dtype, "".join(special)))
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
    num_parameters = sum(num_elements(p) for p in engine._policy.parameters())
    held = held_bytes(engine._policy, before) / num_parameters
    engine._engine.destroy()
    return held


def private_bytes() -> int:
    """Of this process, without pages of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def largest_private() -> Iterator[list[int]]:
    """The largest growth of this process's private memory inside, as a list of one."""
    start, growth, done = private_bytes(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            growth[0] = max(growth[0], private_bytes() - start)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield growth
    finally:
        done.set()
        sampler.join()


def load(folder: Path) -> list[list[float]]:
    """By rank, for policy and reference."""
    settings = config(folder, 3, "fp32", "", "large", kl_coef=0.1)
    growths: list[int] = []

    def load_model() -> PolicyModel:
        with largest_private() as growth:
            policy = load_policy_model(settings.model)
        growths.append(growth[0])
        return policy

    engine = DeepSpeedEngine(settings, load_model=load_model)
    num_parameters = sum(num_elements(p) for p in engine._policy.parameters())
    told = Collectives(engine.ranks).all_gather(growths)
    return [[nbytes / num_parameters for nbytes in rank] for rank in told]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    folder, *names = (a for a in sys.argv[1:] if not a.startswith("--local_rank"))
    start_process_group()
    # The smaller engines have imported what loading needs.
    measures = {name: load if name == "load" else partial(measure, case=name) for name in names}
    results = {name: measures[name](Path(folder)) for name in names}
    if dist.get_rank() == 0:
        (Path(folder) / "held.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
