"""Saves and restores engines of several layouts in the processes of one launch; see test_state.py.

``python state_worker.py FOLDER PHASE`` or under the launcher. Each saved state is a folder with a
file of each rank, ``description.json`` and ``weights.safetensors``. Phases, of each model:

- ``split`` (four processes): one step with a split model, saved; another step, saved. Then other
  layouts go on from the first, save it again and make the second step.
- ``alone`` (one process): DeepSpeed's engine does the same, from what the layouts saved
- ``back`` (four processes): the split model again, from what DeepSpeed's engine saved; and what
  does not fit is refused
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from benchmarks.parts.layouts.cases import Case, configuration, functions, updates
from easyrl.engines.base import TrainEngine
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.engines.megatron.engine import MegatronEngine
from easyrl.engines.process_group import start_process_group
from easyrl.engines.state_file import StateReader
from easyrl.schema import MicroBatch
from tests.easyrl.engines.megatron.state_cases import (
    ADAM,
    MODELS,
    alone,
    back,
    others,
    saved_name,
    written,
)


class Session:
    """The processes of this launch, and engines in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        start_process_group()
        self.rank = dist.get_rank()

    def engine(self, case: Case) -> TrainEngine:
        print(f"rank {self.rank}: {case}", flush=True)
        config = configuration(self.folder, case, ADAM)
        if case.name == "alone":
            return DeepSpeedEngine(config)
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        return MegatronEngine(config, case.layout)  # type: ignore[return-value]

    def step(self, engine: TrainEngine, case: Case, number: int) -> float:
        """A batch of one update; its learning rate."""
        group_functions, groups = functions(self.folder, case), updates()[number]
        engine.begin_batch()
        engine.forward_backward(self._rows(case, number))
        result = engine.optimizer_step(group_functions.denominator(groups))
        assert not result.skipped
        return result.learning_rate

    def save(self, engine: TrainEngine, name: str, **told: float) -> None:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        snapshot = engine.snapshot()
        snapshot.write(folder, f"rank-{self.rank}")
        weights = {n: w.clone() for n, w in engine.named_weights() if w.device.type != "meta"}
        if self.rank == 0:
            save_file(weights, folder / "weights.safetensors")
            description = dict(snapshot.description) | told
            (folder / "description.json").write_text(json.dumps(description))
        dist.barrier()

    def restore(self, engine: TrainEngine, name: str) -> None:
        with closing(read_saved(self.folder / name)) as saved:
            engine.restore(saved)

    def go_on(self, case: Case, source: str) -> None:
        """From ``source``, saved again; another step, saved."""
        engine = self.engine(case)
        self.restore(engine, source)
        self.save(engine, saved_name(case, 1))
        self.step(engine, case, 1)
        self.save(engine, saved_name(case, 2))

    def refusal(self, case: Case, source: str) -> str:
        """What an engine says to a checkpoint that does not fit."""
        try:
            self.restore(self.engine(case), source)
        except ValueError as error:
            return str(error)
        return ""

    def _rows(self, case: Case, number: int) -> list[MicroBatch]:
        """This data-parallel rank's; as many on each, with dummies."""
        group_functions, groups, layout = (
            functions(self.folder, case),
            updates()[number],
            case.layout,
        )
        of_ranks = [
            group_functions.pack(group_functions.trained(groups[rank :: layout.data], (), ()))
            for rank in range(layout.data)
        ]
        rows = of_ranks[layout.place(self.rank).data]
        return rows + [group_functions.dummy()] * (max(map(len, of_ranks)) - len(rows))


def read_saved(folder: Path) -> StateReader:
    description = json.loads((folder / "description.json").read_text())
    return StateReader(sorted(folder.glob("rank-*.safetensors")), description)


def split(session: Session) -> None:
    for tied, dtype in MODELS:
        case = written(tied, dtype)
        engine = session.engine(case)
        session.save(engine, saved_name(case, 0))
        rate = session.step(engine, case, 0)
        session.save(engine, saved_name(case, 1), rate=rate)
        session.step(engine, case, 1)
        session.save(engine, saved_name(case, 2))
        for other in others(tied, dtype):
            session.go_on(other, saved_name(case, 1))


def one_process(session: Session) -> None:
    for tied, dtype in MODELS:
        session.go_on(alone(tied, dtype), saved_name(others(tied, dtype)[0], 1))


def split_again(session: Session) -> None:
    for tied, dtype in MODELS:
        session.go_on(back(tied, dtype), saved_name(alone(tied, dtype), 1))
    first = saved_name(written(True, "fp32"), 1)
    said = [session.refusal(written(*model), first) for model in ((False, "fp32"), (True, "bf16"))]
    case = written(True, "fp32")
    engine = session.engine(case)  # goes on from before the first step, and so as it began
    session.step(engine, case, 0)
    session.restore(engine, saved_name(case, 0))
    session.step(engine, case, 0)
    session.save(engine, "begun-again")
    (session.folder / f"refusals-{session.rank}.json").write_text(json.dumps(said))


PHASES = {"split": split, "alone": one_process, "back": split_again}

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    current = Session(Path(arguments[0]))
    PHASES[arguments[1]](current)
    dist.barrier()
    dist.destroy_process_group()
