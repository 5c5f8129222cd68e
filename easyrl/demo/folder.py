"""The demo's run folder: begun anew each time; what an earlier demo has left is moved beside it."""

from __future__ import annotations

import itertools
import shutil
from contextlib import ExitStack
from pathlib import Path

from easyrl.config import ConfigError
from easyrl.runtime.run_files import LOCK_FILE
from easyrl.runtime.run_folder import locked_folder


def fresh_folder(run_dir: Path, held: ExitStack) -> None:
    """An empty ``run_dir``, locked by ``held``.

    What an earlier demo has left there is moved beside it. Raises ``ConfigError`` if it holds
    something else, or another process uses it; then it is left as it was.
    """
    if run_dir.exists():
        left = {path.name for path in run_dir.iterdir()} - {LOCK_FILE}
        # one that was interrupted in its warm start has problems, and no model yet
        if left and not (run_dir / "base_model").is_dir() and left != {"data"}:
            raise ConfigError(
                f"{run_dir} holds something else; give another folder: make demo RUN=DIR, or "
                "--run-dir DIR"
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    held.enter_context(locked_folder(run_dir, 0))
    earlier = [path for path in run_dir.iterdir() if path.name != LOCK_FILE]
    if earlier:
        aside = _free_name(run_dir)
        aside.mkdir()
        for path in earlier:
            shutil.move(path, aside)
        print(f"what an earlier demo has left in {run_dir} is now in {aside}")


def _free_name(folder: Path) -> Path:
    """``folder`` with the first number behind it that no folder has."""
    numbers = itertools.count(1)
    return next(
        free for n in numbers if not (free := folder.with_name(f"{folder.name}-{n}")).exists()
    )
