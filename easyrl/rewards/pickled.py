"""Reward functions pickled by value: what a script, notebook or closure defines, in a file.

A worker that loads one does not import the script. What an importable module defines at its top
level is pickled by name, and imported.
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
from pathlib import Path
from types import CodeType
from typing import Any

DYNAMIC = "<dynamic-code>"  # cloudpickle's name of every file


def pickle_reward(function: Any) -> bytes:
    """``function`` for ``load_pickled``. Raises ``ValueError`` for what cannot be pickled."""
    from cloudpickle import CloudPickler

    def with_its_file(code: CodeType) -> tuple[Any, ...]:
        make, parts, *state = CloudPickler.dispatch_table[CodeType](code)
        if Path(code.co_filename).is_file():  # a notebook's cells have other names each time
            parts = tuple(code.co_filename if part == DYNAMIC else part for part in parts)
        return make, parts, *state

    class Pickler(CloudPickler):
        """Tracebacks name the script and its lines."""

        dispatch_table = CloudPickler.dispatch_table.new_child({CodeType: with_its_file})

    text = io.BytesIO()
    try:
        Pickler(text).dump((function, _imported_source(function)))
        return text.getvalue()
    except Exception as error:  # of whatever object it refers to
        said = " ".join(str(error).split())
        raise ValueError(
            f"cannot be pickled for the worker processes ({type(error).__name__}: {said:.200}); "
            "make what it refers to inside it, or define it with def in a file of its own"
        ) from error


def load_pickled(file: Path) -> Any:
    """The function in ``file``. Raises ``ImportError``."""
    try:
        function, _ = pickle.loads(file.read_bytes())
    except Exception as error:  # what it imports may be missing here, or raise
        said = " ".join(str(error).split())
        raise ImportError(
            f"{file} is no pickled reward that can be loaded here ({type(error).__name__}: "
            f"{said:.200}); start the run with train_policy again"
        ) from error
    return function


def _imported_source(function: Any) -> str:
    """Of a function that is pickled by name: another text is another reward."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return ""
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""
