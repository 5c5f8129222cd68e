"""An engine whose state is a few tensors that tell their step, for tests of what is on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from easyrl.engines.base import SavedState, StatePiece
from easyrl.engines.state_file import EngineState
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks

NUM_ELEMENTS = 1000


class FakeEngine:
    """``step`` is all its state; each tensor is a function of it."""

    def __init__(self, num_elements: int = NUM_ELEMENTS) -> None:
        self.step = 0
        self._num_elements = num_elements

    def tensors(self) -> dict[str, torch.Tensor]:
        values = torch.arange(self._num_elements, dtype=torch.float32) + self.step
        return {"master/a": values, "exp_avg/a": -values, "old_policy/b": values[:7].bfloat16()}

    def snapshot(self) -> EngineState:
        pieces = [StatePiece(key, 0, value) for key, value in self.tensors().items()]
        return EngineState(pieces, {"step": self.step})

    def restore(self, saved: SavedState) -> None:
        self.step = saved.description["step"]
        for key, expected in self.tensors().items():
            assert saved.numel(key) == expected.numel()
            assert torch.equal(saved.read(key, 0, expected.numel()), expected)


def checkpoints(
    directory: Path, *, keep: int = 2, background: bool = False, **options: Any
) -> tuple[FakeEngine, Checkpoints]:
    """A fake engine and its checkpoints, one rank."""
    num_elements = options.pop("num_elements", NUM_ELEMENTS)
    engine = options.pop("engine", None) or FakeEngine(num_elements)
    return engine, Checkpoints(
        directory,
        keep,
        engine,  # type: ignore[arg-type]
        Collectives(Ranks.data_parallel(0, 1)),
        background,
        **options,
    )


def save(directory: Path, *steps: int, **options: Any) -> None:
    """An attempt that saves ``steps``; the state is ``{"at": step}``."""
    engine, saved = checkpoints(directory, **options)
    for step in steps:
        engine.step = step
        saved.save(step, {"at": step})
    saved.wait()


def load(directory: Path) -> int | None:
    """A fresh attempt: the step of the checkpoint that it goes on from."""
    engine, saved = checkpoints(directory)
    state = saved.load_latest()
    if state is None:
        return None
    assert state == {"at": engine.step}
    return engine.step
