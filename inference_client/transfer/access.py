"""File modes of the weights on their way: their owner's alone, or readable for a group too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Access:
    """Modes of folders and files, whatever the umask."""

    folder: int
    file: int

    def make_folder(self, path: Path) -> None:
        """A new folder; nobody else sees into it at any time. Raises ``OSError``."""
        path.mkdir(mode=0o700)
        path.chmod(self.folder)  # mkdir leaves out what the umask says


OWNER = Access(0o700, 0o600)
GROUP = Access(0o750, 0o640)
