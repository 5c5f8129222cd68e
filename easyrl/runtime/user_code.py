"""Where in a user's file something is defined or was raised, as ``file:line``."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import Any


def definition(function: Any) -> str | None:
    """Of a function (a wrapped one's own); None if it has no code of its own."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def raised_at(error: BaseException, file: Path) -> str:
    """The innermost line of ``file`` that ``error`` came through; else ``file`` itself."""
    file = file.resolve()
    if isinstance(error, SyntaxError) and error.filename == str(file) and error.lineno:
        return f"{file}:{error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == file
    ]
    return f"{file}:{lines[-1]}" if lines else str(file)


def describe(error: BaseException) -> str:
    """Type and message on one line; of a syntax error without the place, which is said apart."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(message.split())}".removesuffix(": ")


def import_remedy(error: BaseException) -> str:
    """What else helps where ``error`` was met while importing a user's file."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f", or install {error.name.partition('.')[0]} in the trainer's environment"
    return ""
