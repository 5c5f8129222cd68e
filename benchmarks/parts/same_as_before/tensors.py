"""The tensors of a run's checkpoints, joined from the ranks' files, and how far two runs differ.

Read with ``safetensors`` alone, by the tensors' names: files may be called and cut otherwise.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor

PLACES = "DCP_SHARDING_INFO"  # torch.distributed.checkpoint's: where a piece starts in its tensor
TINY = float(torch.finfo(torch.float32).tiny)

State = Mapping[str, Tensor]  # weights, Adam's moments and its step counts, each flat


@dataclass(frozen=True, slots=True)
class Difference:
    """What two runs of a setting differ in."""

    equal_batches: list[bool]
    max_rel_diff: float  # over all tensors: the largest |a - b| over the largest |a|

    @property
    def equal(self) -> bool:
        return all(self.equal_batches)


def read_states(run_dir: Path) -> list[State]:
    """One state for each checkpoint below ``run_dir``, in the order of the folders' numbers."""
    folders = {file.parent for file in run_dir.rglob("*.safetensors")}
    numbered = {int(n[0]): f for f in folders if (n := re.search(r"\d+$", f.name))}
    return [read_state(numbered[number]) for number in sorted(numbered)]


def read_state(folder: Path) -> State:
    """All tensors in the files of ``folder``.

    Pieces of one tensor are put together by where their file says that they start, else by the
    files' names.
    """
    pieces: dict[str, list[tuple[list[int], Tensor]]] = defaultdict(list)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            places = json.loads((opened.metadata() or {}).get(PLACES, "{}"))
            for name in opened.keys():  # noqa: SIM118 - not a dict
                start = places.get(name, {}).get("saved_offsets", [0])
                pieces[name].append((start, opened.get_tensor(name).reshape(-1)))
    return {
        name: torch.cat([values for _, values in sorted(found, key=lambda piece: piece[0])])
        for name, found in pieces.items()
    }


def digest(values: Tensor) -> str:
    """Of type, length and bits."""
    header = f"{values.dtype} {values.numel()}\n".encode()
    return blake3(header + values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def digests(state: State) -> dict[str, str]:
    """By tensor."""
    return {name: digest(values) for name, values in state.items()}


def unchanged(states: Sequence[State]) -> list[str]:
    """Tensors that are after the last batch what they were after the first."""
    first, last = digests(states[0]), digests(states[-1])
    return sorted(name for name in first if first[name] == last.get(name))


def compare(base: Sequence[State], present: Sequence[State]) -> Difference:
    """The difference of two runs, batch by batch.

    Raises ``ValueError`` if they do not hold the same tensors, or hold values that are not finite.
    """
    largest, equal = 0.0, []
    for before, now in zip(base, present, strict=True):
        if before.keys() != now.keys():
            raise ValueError(
                f"the checkpoints hold other tensors: only the base's {_some(before, now)}, only "
                f"the present one's {_some(now, before)}"
            )
        equal.append(digests(before) == digests(now))
        for name, values in before.items():
            largest = max(largest, relative_difference(name, values, now[name]))
    return Difference(equal, largest)


def relative_difference(name: str, a: Tensor, b: Tensor) -> float:
    """Largest |a - b| over the largest |a|. Raises ``ValueError`` for unequal lengths and NaNs."""
    if a.shape != b.shape:
        raise ValueError(f"{name} has {a.numel()} elements in the base's checkpoint, {b.numel()}")
    x, y = a.double(), b.double()
    if not (x.isfinite().all() and y.isfinite().all()):
        raise ValueError(f"{name} holds values that are not finite")
    if x.numel() == 0:
        return 0.0
    return float((x - y).abs().max()) / max(float(x.abs().max()), TINY)


def _some(ours: State, theirs: State) -> str:
    names = sorted(ours.keys() - theirs.keys())
    return f"{names[:5]}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
