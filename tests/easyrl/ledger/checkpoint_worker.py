"""Saves and restores real engines in one or several fresh processes; see test_checkpoint_state.py.

``python checkpoint_worker.py FOLDER PHASE`` or under the launcher. Each rank leaves
``PHASE-rank*.json``. Phases, each of which goes through all stages and dtypes:

- ``write`` (two ranks): two steps, a checkpoint that is written while two more are trained
- ``alone`` (one rank): loads it, with another ZeRO stage too, and saves it again
- ``resume`` (two ranks): loads both, trains the two steps again
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import pickle
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from blake3 import blake3
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from easyrl.engines import state_file
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.ledger.checkpoints.checkpoints import CheckpointError, Checkpoints
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from tests.easyrl.engines.engine_cases import TEMPERATURE, streamed
from tests.easyrl.engines.engine_worker import ADAM, Session, weights_of
from tests.easyrl.ledger.checkpoint_cases import CASES

OTHER_STAGE = {0: 3, 1: 2, 2: 1, 3: 1}
Results = dict[str, Any]


class Worker:
    """One process of a phase."""

    def __init__(self, folder: Path) -> None:
        self.session = Session(folder)
        self.collectives = Collectives(Ranks.data_parallel(self.session.rank, self.session.size))
        self.folder = folder

    def engine(self, stage: int, dtype: str) -> DeepSpeedEngine:
        gc.freeze()
        # two parameter groups: matrices decay, norms do not
        return self.session.engine(stage, dtype, **ADAM, weight_decay=0.1)

    def checkpoints(
        self, engine: DeepSpeedEngine, name: str, *, background: bool = False
    ) -> Checkpoints:
        return Checkpoints(self.folder / name, 2, engine, self.collectives, background)

    def train(self, engine: DeepSpeedEngine) -> Results:
        """Two steps: their norms, the state after them."""
        norms = [self.session.train(engine, seed) for seed in (2, 3)]
        return {"norms": norms, "rate": engine._engine.get_lr()[0], "after": hashes(engine)}

    def write(self, stage: int, dtype: str) -> Results:
        engine = self.engine(stage, dtype)
        for seed in (0, 1):
            self.session.train(engine, seed)
        checkpoints = self.checkpoints(engine, f"two-{stage}-{dtype}", background=True)
        saved = hashes(engine)
        trained = threading.Event()
        with late_writing(trained):
            checkpoints.save(2, {"step": 2})
            straight = self.train(engine)
            trained.set()
            checkpoints.wait()
        pieces = engine.snapshot().pieces
        parameters = engine._policy.model.parameters()
        return {
            "saved": saved,
            "straight": straight,
            "share": sum(p.values.nbytes for p in pieces),
            "elements": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        }

    def alone(self, stage: int, dtype: str) -> Results:
        engine = self.engine(stage, dtype)
        fresh = hashes(engine)
        state = self.checkpoints(engine, f"two-{stage}-{dtype}").load_latest()
        assert state == {"step": 2}
        loaded = hashes(engine)
        self.checkpoints(engine, f"one-{stage}-{dtype}").save(2, {"step": 2})
        other_stage = OTHER_STAGE[stage] if (stage, dtype) != (1, "bf16") else 3
        other = self.engine(other_stage, dtype)
        self.checkpoints(other, f"two-{stage}-{dtype}").load_latest()
        return {"fresh": fresh, "loaded": loaded, "other_stage": hashes(other)}

    def resume(self, stage: int, dtype: str) -> Results:
        engine = self.engine(stage, dtype)
        with no_pickle():
            self.checkpoints(engine, f"two-{stage}-{dtype}").load_latest()
        loaded = hashes(engine)
        resumed = self.train(engine)
        with no_pickle():  # over what is there
            self.checkpoints(engine, f"one-{stage}-{dtype}").load_latest()
        return {"loaded": loaded, "resumed": resumed, "grown": hashes(engine)}

    def before_the_first_step(self) -> Results:
        """A checkpoint of step 0 has no moments; what is loaded trains as what was saved."""
        engine, resumed = self.engine(1, "bf16"), self.engine(1, "bf16")
        self.checkpoints(engine, "first").save(0, {})
        self.session.train(resumed)  # moments that have to go
        self.checkpoints(resumed, "first").load_latest()
        return {"straight": self.train(engine), "resumed": self.train(resumed)}

    def full_disk_of_one_rank(self) -> Results:
        """The last rank has no room: all raise, and the checkpoint before is the one to load."""
        engine = self.engine(2, "fp32")
        checkpoints = self.checkpoints(engine, "full", background=True)
        checkpoints.save(1, {"step": 1})
        checkpoints.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.session.rank == self.session.size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        message = ""
        try:
            checkpoints.save(2, {"step": 2})
            checkpoints.wait()
        except CheckpointError as error:
            message = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        dist.barrier()
        left = sorted(path.name for path in (self.folder / "full").iterdir())
        loaded = checkpoints.load_latest()
        dist.barrier()
        checkpoints.save(2, {"step": 2})  # there is room again
        checkpoints.wait()
        return {
            "message": message,
            "left": left,
            "loaded": loaded,
            "then": checkpoints.folder.steps(),
        }


def hashes(engine: DeepSpeedEngine) -> dict[str, str]:
    """Of weights, masters, moments, step counts, old policy and schedule. All ranks call it."""
    optimizer = engine._engine.optimizer
    adam = getattr(optimizer, "optimizer", optimizer)
    found = {f"weight/{n}": _hash(t) for n, t in weights_of(engine).items()}
    counts = sorted({float(s["step"]) for s in adam.state.values() if s})
    if counts and hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        # linked after the first group's step, when the second group's moments are not there yet
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine._policy.model.named_parameters():
        if engine._stage == 0:
            master = parameter.data
            moments = [adam.state[parameter].get(k) for k in ("exp_avg", "exp_avg_sq")]
        else:
            master = safe_get_full_fp32_param(parameter)
            moments = [
                safe_get_full_optimizer_state(parameter, key) if counts else None
                for key in ("exp_avg", "exp_avg_sq")
            ]
        found[f"master/{name}"] = _hash(master)
        for key, value in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            found[f"{key}/{name}"] = "" if value is None else _hash(value)
    old = engine._tri_model.old_policy
    assert old is not None
    probe = streamed("token")[0]
    found["old_policy"] = _hash(
        old.logprobs([(probe, SegmentLayout(probe.segments))], TEMPERATURE)[0]
    )
    found["counts"] = str(counts)
    found["schedule"] = str((engine._engine.lr_scheduler.last_epoch, engine._engine.get_lr()))
    return found


def _hash(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return blake3(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@contextlib.contextmanager
def late_writing(gate: threading.Event) -> Iterator[None]:
    """The writer touches its copy only when training has gone on."""
    write = state_file.write_state_file

    def gated(*args: Any) -> Any:
        assert gate.wait(60)
        return write(*args)

    with mock.patch.object(state_file, "write_state_file", gated):
        yield


@contextlib.contextmanager
def no_pickle() -> Iterator[None]:
    """Unpickling anything raises."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was opened")

    with contextlib.ExitStack() as patched:
        for owner, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
            patched.enter_context(mock.patch.object(owner, name, refuse))
        patched.enter_context(mock.patch.object(pickle, "Unpickler", refuse))
        yield


def main(folder: Path, phase: str) -> None:
    worker = Worker(folder)
    results: dict[str, Results] = {}
    for stage, dtype in CASES:
        print(f"rank {worker.session.rank}: {phase} {stage} {dtype}", flush=True)
        results[f"{stage}/{dtype}"] = getattr(worker, phase)(stage, dtype)
    if phase == "resume":
        results["first"] = worker.before_the_first_step()
        results["full"] = worker.full_disk_of_one_rank()
    (folder / f"{phase}-rank{worker.session.rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    main(Path(arguments[0]), arguments[1])
