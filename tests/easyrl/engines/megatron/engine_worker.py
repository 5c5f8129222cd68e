"""Calls each method of the engine in several layouts; see test_engine.py.

``python engine_worker.py FOLDER alone`` leaves what DeepSpeed's engine makes of the batch in
``expected-{tied,untied}.pt``; under the launcher ``FOLDER split`` leaves ``CASE-RANK.pt`` of each
layout of so many processes, ``recomputed`` and ``families`` the like.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from benchmarks.parts.layouts.cases import TEMPERATURE, Case, configuration, model_folder
from easyrl.config import Config, ConfigError
from easyrl.engines.base import MetricSums, NonFiniteLossError, TrainEngine
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.engines.megatron.engine import MegatronEngine
from easyrl.engines.process_group import start_process_group
from easyrl.models.loading import load_policy_model
from easyrl.models.policy_model import run_micro_batch
from easyrl.schema import MicroBatch
from tests.easyrl.engines.megatron.engine_cases import (
    ADAM,
    FAMILIES,
    FAMILY_LAYOUTS,
    RECOMPUTED,
    SPLIT,
    alone,
    config_of,
    family_folder,
    partly_known,
    update,
    with_infinite_loss,
)
from tests.kernels.memory_recorder import PeakMemory

Told = dict[str, Any]


@contextmanager
def split_engine(config: Config, case: Case) -> Iterator[MegatronEngine]:
    engine = MegatronEngine(config, case.layout)
    try:
        yield engine
    finally:
        engine._engine.destroy()
        del engine
        parallel_state.destroy_model_parallel()


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    """Empty on ranks that do not get them. Collective."""
    return {n: w.clone() for n, w in engine.named_weights() if w.device.type != "meta"}


def metrics(told: list[MetricSums]) -> list[dict[str, Any]]:
    return [asdict(sums) for sums in told]


# ---- what is expected ----------------------------------------------------------------------------


def expected(folder: Path, tied: bool) -> Told:
    """Of DeepSpeed's engine, which runs all rows in one process."""
    case = Case("alone", SPLIT[2][0].layout, 0, "fp32", tied)
    engine = DeepSpeedEngine(configuration(folder, alone(case), ADAM))
    reference: Any = engine._tri_model.reference
    other = load_policy_model(
        configuration(folder, case, ADAM).model.model_copy(
            update={"path": model_folder(folder, "reference", tied)}
        )
    )
    reference.module.load_state_dict(other.state_dict())
    engine.begin_batch()
    told: Told = {"before": weights(engine)}
    for number in (0, 1):
        rows, denominator = update(folder, case, number)
        told[f"logprobs-{number}"] = [engine.logprobs(row) for row in rows]
        told[f"frozen-{number}"] = [engine.frozen_logprobs(row) for row in rows]
        told[f"evaluated-{number}"] = metrics([engine.evaluate(row) for row in rows])
        told[f"trained-{number}"] = metrics(engine.forward_backward(rows))
        told[f"step-{number}"] = asdict(engine.optimizer_step(denominator))
    return told | {"after": weights(engine)}


# ---- what each layout makes of it ----------------------------------------------------------------


class Calls:
    """The methods of one engine, called in turn; ``told`` is what comes of them here."""

    def __init__(self, folder: Path, case: Case, engine: MegatronEngine) -> None:
        self._folder, self._case, self._engine = folder, case, engine
        self._updates = [update(folder, case, number) for number in (0, 1)]
        self.told: Told = {}

    def run(self) -> Told:
        engine = self._engine
        for chunk in engine._frozen["reference"]:
            chunk.load(model_folder(self._folder, "reference", self._case.tied))
        engine.begin_batch()
        self.told |= {"place": engine.place, "lockstep": engine.lockstep}
        self.told |= {"looks-ahead": engine.can_look_ahead, "before": weights(engine)}
        self.without_a_step()
        self.first_update()
        self.second_update()
        self.perturbed()
        return self.told

    def without_a_step(self) -> None:
        """None of it may leave a trace."""
        engine, rows = self._engine, self._updates[0].rows
        engine.forward_backward(self._own(rows))
        engine.discard_gradients()
        wrong = list(rows)
        wrong[1] = with_infinite_loss(rows[1])
        try:
            engine.forward_backward(self._own(wrong))
            self.told["raised"] = ""
        except NonFiniteLossError as error:
            self.told["raised"] = str(error)
        self.told["infinite"] = asdict(engine.optimizer_step(1.0))
        if not engine.lockstep:
            self.told["nothing"] = asdict(engine.optimizer_step(1.0))
        self.told["unchanged"] = weights(engine)

    def first_update(self) -> None:
        """The first row alone, then the others; without lock-step all on one data-parallel rank."""
        self._ask(0)
        engine, (rows, denominator) = self._engine, self._updates[0]
        own = self._own(rows)
        if not engine.lockstep:
            own = rows if engine.ranks.dp_rank == 0 else []
        sent = self._sent()
        said = [engine.forward_backward(some) for some in (own[:1], own[1:]) if some]
        assert engine.finish_backwards() == []  # one that tells has told all
        self.told["trained-0"] = metrics([each for some in said for each in some])
        self.told["sent-0"] = {name: self._sent()[name] - sent[name] for name in sent}
        self.told["tokens-0"] = sum(row.num_tokens for row in own)
        self.told["step-0"] = asdict(engine.optimizer_step(denominator))

    def second_update(self) -> None:
        """Of some rows the frozen models have spoken; these go without them."""
        self._ask(1)
        engine, (rows, denominator) = self._engine, self._updates[1]
        said = torch.load(
            self._folder / f"expected-{name_of(self._case.tied)}.pt", weights_only=False
        )
        known = partly_known(rows, said["frozen-1"])
        sent = self._sent()
        self.told["trained-1"] = metrics(engine.forward_backward(self._own(known)))
        engine.finish_backwards()
        self.told["sent-1"] = {name: self._sent()[name] - sent[name] for name in sent}
        self.told["streams-1"] = [3 - _num_known(row) for row in known]
        self.told["tokens-1"] = [row.num_tokens for row in known]
        self.told["step-1"] = asdict(engine.optimizer_step(denominator))
        self.told["after"] = weights(engine)

    def perturbed(self) -> None:
        engine = self._engine
        with engine.perturbed_weights("full"):
            self.told["perturbed"] = weights(engine)
        self.told["restored"] = weights(engine)

    def _ask(self, number: int) -> None:
        """What the models say of the rows, before they are trained."""
        engine, rows = self._engine, self._updates[number].rows
        self.told[f"has-frozen-{number}"] = engine.has_frozen_models
        self.told[f"logprobs-{number}"] = [engine.logprobs(row) for row in rows]
        self.told[f"frozen-{number}"] = [engine.frozen_logprobs(row) for row in rows]
        self.told[f"evaluated-{number}"] = metrics([engine.evaluate(row) for row in rows])

    def _own(self, rows: list[MicroBatch]) -> list[MicroBatch]:
        """This data-parallel rank's; of an even number."""
        ranks = self._engine.ranks
        assert len(rows) % ranks.dp_size == 0
        return rows[ranks.dp_rank :: ranks.dp_size]

    def _sent(self) -> dict[str, int]:
        return dict(self._engine._runner.sent_bytes)


def _num_known(row: MicroBatch) -> int:
    if row.frozen is None:
        return 0
    return sum(said is not None for said in (row.frozen.reference, row.frozen.old_policy))


def name_of(tied: bool) -> str:
    return "tied" if tied else "untied"


# ---- phases --------------------------------------------------------------------------------------


def one_process(folder: Path) -> None:
    for tied in (True, False):
        torch.save(expected(folder, tied), folder / f"expected-{name_of(tied)}.pt")


def split(folder: Path) -> None:
    for case in SPLIT[dist.get_world_size()]:
        with split_engine(configuration(folder, case, ADAM), case) as engine:
            told = Calls(folder, case, engine).run()
        torch.save(told, folder / f"{case.name}-{dist.get_rank()}.pt")
    if dist.get_world_size() == 2:
        (folder / f"refusals-{dist.get_rank()}.txt").write_text("\n".join(refusals(folder)))


def refusals(folder: Path) -> Iterator[str]:
    """What the engine says by itself to recipes that need what it has not.

    ``parallel`` is as it is by default: with it loading the recipe would already refuse.
    """
    case = SPLIT[2][0]
    config = configuration(folder, case, ADAM)
    for name, settings in (("ppo", {}), ("distillation", {"teacher": str(config.model.path)})):
        recipe = type(config.recipe).model_validate({"name": name} | settings)
        try:
            MegatronEngine(config.model_copy(update={"recipe": recipe}), case.layout)
        except ConfigError as error:
            yield str(error)
        parallel_state.destroy_model_parallel()


def recomputed(folder: Path) -> None:
    """Steps and the most memory of a row, by what is computed again in the backward pass."""
    for case in RECOMPUTED:
        rows, denominator = update(folder, case, 0)
        told: Told = {}
        for mode, every in (("none", 1), ("layer", 1), ("layer", 2), ("selective", 1)):
            settings = {"activation_checkpointing": mode, "checkpoint_every": every}
            with split_engine(config_of(folder, case, **settings), case) as engine:
                engine.begin_batch()
                engine.forward_backward(rows)
                norm = engine.optimizer_step(denominator).grad_norm
                engine.forward_backward(rows[:1])
                engine.finish_backwards()
                with PeakMemory() as memory:
                    engine.forward_backward(rows[:1])
                    engine.finish_backwards()
                engine.discard_gradients()
                told[f"{mode}-{every}"] = norm, memory.peak, weights(engine)
        torch.save(told, folder / f"recomputed-{case.name}-{dist.get_rank()}.pt")


def families(folder: Path) -> None:
    """Each family in two layouts: its log-probabilities, and its weights as they were read."""
    for name, layout in FAMILY_LAYOUTS.items():
        for family, tied in FAMILIES:
            case = Case(name, layout, tied=tied)
            config = config_of(folder, case, path=family_folder(folder, family))
            row = update(folder, case, 0).rows[0]
            with split_engine(config, case) as engine:
                told = {"logprobs": engine.logprobs(row), "weights": weights(engine)}
                told["tells"] = engine.place.tells
            with torch.no_grad():
                whole = load_policy_model(config.model)
                told["expected"] = run_micro_batch(whole, row, TEMPERATURE)[0]
            torch.save(told, folder / f"{name}-{family}-{dist.get_rank()}.pt")


PHASES = {"alone": one_process, "split": split, "recomputed": recomputed, "families": families}

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    made, phase = (a for a in sys.argv[1:] if not a.startswith("--local_rank"))
    start_process_group()
    PHASES[phase](Path(made))
    dist.barrier()
    dist.destroy_process_group()
