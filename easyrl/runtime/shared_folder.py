"""Whether the run's folder is one and the same on all nodes."""

from __future__ import annotations

import secrets
import socket
import time
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
    mark = folder / f".seen-{secrets.token_hex(8)}"
    if collectives.ranks.is_first:
        mark.touch()
    mark = folder / collectives.broadcast(mark.name)
    try:
        said = [_appears(mark), socket.gethostname()]
        blind = [
            f"rank {rank} on {host}"
            for rank, (sees, host) in enumerate(collectives.all_gather(said))
            if not sees
        ]
    finally:
        if collectives.ranks.is_first:
            mark.unlink(missing_ok=True)
    if blind:
        raise ConfigError(
            f"run.output_dir: {folder} is not the same folder on all training nodes: "
            f"{', '.join(blind)} does not see what rank 0 has written there; put it on a disk that "
            "they share"
        )


def _appears(file: Path) -> bool:
    deadline = time.monotonic() + VISIBLE_S
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
