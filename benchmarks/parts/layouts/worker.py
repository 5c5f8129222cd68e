"""Runs cases in the processes of one launch and compares each with the single-process model.

Started by the ``deepspeed`` launcher with a folder that ``cases.write_models`` filled and that has
``gold-tied.pt`` and ``gold-untied.pt``, and names of cases. Rank 0 appends a JSON line per case to
``rows.jsonl``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from benchmarks.parts.layouts.cases import (
    ADAM,
    KL_COEF,
    NUM_UPDATES,
    SGD,
    SGD_SCALE,
    Case,
    cases,
    configuration,
    functions,
    model_folder,
    updates,
)
from benchmarks.parts.layouts.gold import Gold
from benchmarks.parts.layouts.traps import TRAP, plant
from easyrl.engines.megatron.engine import MegatronEngine
from easyrl.engines.process_group import start_process_group
from easyrl.schema import MicroBatch, RolloutGroup


@dataclass
class Compared:
    """A case's errors; ``*_err`` as ``benchmarks.layouts`` says."""

    name: str
    dtype: str
    tied: bool
    groups_per_row: float
    kl: float
    updates: int
    logprob_err: float
    grad_err: float
    grad_norm_err: float
    step2_err: float
    params_compared: int
    params_total: int


class CaseRun:
    """A case in this process."""

    def __init__(self, folder: Path, case: Case, gold: Gold) -> None:
        self._folder, self._case, self._gold = folder, case, gold
        self._functions = functions(folder, case)
        self._place = case.layout.place(dist.get_rank())

    def compare(self) -> Compared:
        """Collective."""
        case, gold = self._case, self._gold
        engine = self._engine(SGD)
        rows = self._rows(updates()[0])
        logprob_err = _largest(self._logprob_error(engine, rows))
        before = _weights(engine)
        engine.begin_batch()
        norm_err = abs(self._update(engine, 0) / gold.grad_norms[0] - 1)
        after = _weights(engine)
        moved = {name: (before[name] - after[name]).double() / SGD_SCALE for name in after}
        grad_err = max(
            (_relative(moved[n], g) for n, g in gold.gradients.items() if moved), default=0.0
        )
        del engine
        engine = self._engine(ADAM)
        engine.begin_batch()
        for number in range(NUM_UPDATES):
            norm = self._update(engine, number)
            norm_err = max(norm_err, abs(norm / gold.grad_norms[number] - 1))
        weights = _weights(engine)
        step2_err = max(
            (
                float((weights[n].double() - w).abs().max())
                for n, w in gold.weights.items()
                if weights
            ),
            default=0.0,
        )
        return Compared(
            case.name,
            case.dtype,
            case.tied,
            groups_per_row=round(_groups_per_row(rows), 2),
            kl=KL_COEF,
            updates=NUM_UPDATES,
            logprob_err=logprob_err,
            grad_err=_largest(grad_err),
            grad_norm_err=norm_err,
            step2_err=_largest(step2_err),
            params_compared=len(set(moved) & set(gold.gradients)),
            params_total=len(gold.weights),
        )

    def _engine(self, optimizer: dict[str, float]) -> MegatronEngine:
        config = configuration(self._folder, self._case, optimizer)
        engine = MegatronEngine(config, self._case.layout)
        # another than the model that training starts from
        for chunk in engine._frozen["reference"]:
            chunk.load(model_folder(self._folder, "reference", self._case.tied))
        return engine

    def _update(self, engine: MegatronEngine, number: int) -> float:
        """The norm before the clip."""
        groups = updates()[number]
        engine.forward_backward(self._rows(groups))
        result = engine.optimizer_step(self._functions.denominator(groups))
        assert not result.skipped
        return result.grad_norm

    def _rows(self, groups: list[RolloutGroup]) -> list[MicroBatch]:
        """This data-parallel rank's, with dummies where ZeRO wants as many on each rank."""
        layout = self._case.layout
        of_ranks = [
            self._functions.pack(self._functions.trained(groups[rank :: layout.data], (), ()))
            for rank in range(layout.data)
        ]
        rows = of_ranks[self._place.data]
        wanted = max(map(len, of_ranks)) if self._case.zero_stage >= 2 else len(rows)
        return rows + [self._functions.dummy()] * (wanted - len(rows))

    def _logprob_error(self, engine: MegatronEngine, rows: list[MicroBatch]) -> float:
        worst = 0.0
        for row in rows:
            said = engine.logprobs(row)
            if len(said) == 0 or row.is_dummy:
                continue
            worst = max(worst, float((said.double() - self._expected(row)).abs().max()))
        return worst

    def _expected(self, row: MicroBatch) -> Tensor:
        """Of the row's trained tokens."""
        masks = {
            (group.prompt.index, sample): torch.from_numpy(completion.loss_mask)
            for group in updates()[0]
            for sample, completion in enumerate(group.completions)
        }
        keys = [(key.prompt, key.sample) for key in row.sequences]
        return torch.cat([self._gold.logprobs[key][masks[key]] for key in keys])


def _weights(engine: MegatronEngine) -> dict[str, Tensor]:
    """By Hugging Face's names; empty on ranks that do not get them. Collective."""
    return {n: w.clone() for n, w in engine.named_weights() if w.device.type != "meta"}


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def _largest(value: float) -> float:
    """Over all processes."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def _groups_per_row(rows: list[MicroBatch]) -> float:
    real = [row for row in rows if not row.is_dummy]
    return sum(len({key.prompt for key in row.sequences}) for row in real) / len(real)


def main() -> None:
    given = [each for each in sys.argv[1:] if not each.startswith("--local_rank")]
    folder, names = Path(given[0]), given[1:]
    start_process_group()
    torch.set_num_threads(1)
    if trap := os.environ.get(TRAP):
        plant(trap)
    golds = {
        tied: Gold(*torch.load(folder / f"gold-{t}.pt"))
        for tied, t in ((True, "tied"), (False, "untied"))
    }
    for case in cases():
        if case.name not in names:
            continue
        try:
            row = asdict(CaseRun(folder, case, golds[case.tied]).compare())
        except Exception:
            said = f"{case}\n{traceback.format_exc()}"
            (folder / f"error-rank{dist.get_rank()}.txt").write_text(said)
            raise
        if dist.get_rank() == 0:
            with (folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        dist.barrier()
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
