"""Layouts of a split model by their short names, as ``--parallel`` takes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = re.compile(r"(?:tp(\d+))?(sp)?(?:pp(\d+))?(?:dp(\d+))?")


@dataclass(frozen=True)
class NamedLayout:
    """What a layout asks of the launcher and of the configuration."""

    num_processes: int = 1
    overrides: tuple[str, ...] = ()


def named_layout(name: str) -> NamedLayout:
    """``tp2pp2``: two tensor-parallel ranks, two pipeline stages; ``sp`` behind a ``tp`` shares
    tokens too; ``dp2``: two copies. ZeRO 2 with tensor-parallel ranks alone, 1 else.

    Raises ``ValueError`` for another form.
    """
    found = NAME.fullmatch(name)
    if not name or found is None or "0" in (found[1], found[3], found[4]):
        raise ValueError(
            f"--parallel {name}: is no layout; write for instance tp2pp2, tp2dp2, tp2sp, pp4"
        )
    tensor, pipeline, data = (int(found[number] or 1) for number in (1, 3, 4))
    if tensor * pipeline == 1:
        zero_stage = 1 if data > 1 else 0
    else:
        zero_stage = 1 if pipeline > 1 else 2
    overrides = [
        f"parallel.tensor={tensor}",
        f"parallel.pipeline={pipeline}",
        f"trainer.zero_stage={zero_stage}",
    ]
    if found[2]:
        overrides.append("parallel.sequence=true")
    return NamedLayout(tensor * pipeline * data, tuple(overrides))
