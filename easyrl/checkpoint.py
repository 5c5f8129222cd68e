"""Checkpoints that a run resumes from, and the exported model."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from easyrl.agreement import Agreement
from easyrl.engines.base import TrainEngine
from easyrl.inference_client.weight_transfer.artifact import write_artifact

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")
WEIGHT_INDEX = "model.safetensors.index.json"
EXPORT_SHARD_BYTES = 4 * 2**30


class Checkpoints:
    """``<directory>/step-N``: the engine's state and ``trainer.json``; the newest ``keep`` stay."""

    def __init__(
        self, directory: Path, keep: int, engine: TrainEngine, agreement: Agreement
    ) -> None:
        self.directory = directory
        self._keep = keep
        self._engine = engine
        self._agreement = agreement

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Writes under a temporary name and renames when all ranks are done. Collective."""
        final = self.directory / f"step-{step}"
        temporary = self.directory / f"step-{step}.tmp"
        if self._agreement.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self._agreement.exchange(None)
        self._engine.save(temporary)
        states = self._agreement.exchange(random_state())
        if self._agreement.rank == 0:
            record = {**state, "step": step, "random_states": states}
            (temporary / "trainer.json").write_text(json.dumps(record))
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            for old in self.steps()[: -self._keep]:
                shutil.rmtree(self.directory / f"step-{old}")
        self._agreement.exchange(None)

    def load_latest(self) -> dict[str, Any] | None:
        """Restores the engine and the random state; the saved ``state``, or None. Collective."""
        steps = self._agreement.from_rank_zero(self.steps())
        if not steps:
            return None
        folder = self.directory / f"step-{steps[-1]}"
        self._engine.load(folder)
        state = json.loads((folder / "trainer.json").read_text())
        states = state["random_states"]
        if len(states) == self._agreement.num_ranks:
            restore_random_state(states[self._agreement.rank])
        return state

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, ascending."""
        names = [p.name.removeprefix("step-") for p in self.directory.glob("step-*")]
        return sorted(int(name) for name in names if name.isdigit())


def random_state() -> dict[str, Any]:
    """State of Python's, NumPy's and torch's generators, as JSON."""
    version, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().tolist(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Inverse of ``random_state``."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))


def export_model(
    weights: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    tokenizer: Path,
    target: Path,
    dtype: str,
) -> None:
    """Writes a folder that ``from_pretrained`` loads: safetensors shards, config, tokenizer.

    Args:
        weights: names as ``save_pretrained`` writes them.
        source: the model the run started from; its other files are copied.
        dtype: torch's name of the weights' type, for ``config.json``.
    """
    shutil.rmtree(target, ignore_errors=True)
    artifact = write_artifact(iter(weights), target, "export", EXPORT_SHARD_BYTES)
    weight_map = {name: chunk.file for chunk in artifact.chunks for name in chunk.names}
    index = {"metadata": {}, "weight_map": weight_map}
    for folder in (source, tokenizer):
        for file in folder.iterdir():
            if file.is_file() and file.suffix not in WEIGHT_SUFFIXES and file.name != WEIGHT_INDEX:
                shutil.copy2(file, target / file.name)
    (target / WEIGHT_INDEX).write_text(json.dumps(index, indent=1))
    (target / "manifest.json").unlink()
    config_file = target / "config.json"
    config = json.loads(config_file.read_text())
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    config_file.write_text(json.dumps(config, indent=2))
