"""Whether a folder is one and the same on all nodes."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from easyrl.config import ConfigError
from easyrl.runtime.collectives import Collectives

VISIBLE_S = 15.0  # a network file system shows a new file when it looks the next time
POLL_S = 0.1


def require_shared(folder: Path, collectives: Collectives) -> None:
    """Raises ``ConfigError`` on every rank if one sees another ``folder`` than rank 0. Collective.

    Each rank keeps its journal there, and all of them read each other's.
    """
    if collectives.ranks.dp_size == 1:
        return
    with marked(folder) if collectives.ranks.is_first else nullcontext(folder) as mark:
        mark = folder / collectives.broadcast(mark.name)
        said = [appears(mark), socket.gethostname()]
        blind = [
            f"rank {rank} on {host}"
            for rank, (sees, host) in enumerate(collectives.all_gather(said))
            if not sees
        ]
    if blind:
        raise ConfigError(
            f"run.output_dir: {folder} is not the same folder on all training nodes: "
            f"{', '.join(blind)} does not see what rank 0 has written there; put it on a disk that "
            "they share"
        )


@contextmanager
def marked(folder: Path) -> Iterator[Path]:
    """A new file in ``folder``, gone afterwards: who shares the folder sees it."""
    mark = folder / f".seen-{secrets.token_hex(8)}"
    mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)


def appears(file: Path) -> bool:
    """Whether it is there, or comes to be within ``VISIBLE_S``."""
    deadline = time.monotonic() + VISIBLE_S
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
