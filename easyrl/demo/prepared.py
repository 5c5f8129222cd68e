"""The demo's model and prompts at the places where ``easyrl init`` names them, made if absent."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

DEMO_MODEL = Path("models/demo")
DEMO_DATA = Path("data/demo")  # folder
DEMO_PROMPTS, DEMO_HELD_OUT = DEMO_DATA / "train.jsonl", DEMO_DATA / "heldout.jsonl"


def missing_parts(named: Collection[Path]) -> list[Path]:
    """Those of the demo among ``named`` that are not there."""
    own = (DEMO_MODEL, DEMO_PROMPTS, DEMO_HELD_OUT)
    return [path for path in own if path in named and not path.exists()]


def make_parts(missing: Collection[Path], seed: int) -> None:
    """Makes what ``missing_parts`` has found; a model takes about a minute.

    One that is interrupted leaves nothing behind.
    """
    if {DEMO_PROMPTS, DEMO_HELD_OUT} & set(missing):
        from easyrl.demo.task import write_splits

        write_splits(DEMO_DATA, seed)
    if DEMO_MODEL in missing:
        from transformers.utils.logging import disable_progress_bar

        from easyrl.demo.build_model import build_model

        disable_progress_bar()
        DEMO_MODEL.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".demo-", dir=DEMO_MODEL.parent))
        try:
            build_model(unfinished, seed=seed)
            unfinished.chmod(0o755)
            os.rename(unfinished, DEMO_MODEL)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
