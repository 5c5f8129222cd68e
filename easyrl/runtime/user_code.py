"""Files of the user's: running them, and where in one something is defined or was raised."""

from __future__ import annotations

import dis
import importlib.util
import inspect
import sys
import traceback
from itertools import pairwise
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from easyrl.schema import EndedBySignal


def definition(function: Any) -> str | None:
    """Of a function (a wrapped one's own, an object's ``__call__``); None if it has no code of its
    own."""
    code = _code(function)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def returns_a_value(function: Any) -> bool:
    """Whether it has a ``return`` with something else than ``None``, as far as its code tells."""
    code = _code(function)
    if code is None:
        return True
    instructions = [None, *dis.get_instructions(code)]
    return any(
        (after.opname == "RETURN_CONST" and after.argval is not None)
        or (
            after.opname == "RETURN_VALUE"
            and not (before and before.opname == "LOAD_CONST" and before.argval is None)
        )
        for before, after in pairwise(instructions)
        if after is not None
    )


def _code(function: Any) -> CodeType | None:
    unwrapped = inspect.unwrap(getattr(function, "func", function))  # of a partial
    called = getattr(type(unwrapped), "__call__", None)  # noqa: B004
    code = getattr(unwrapped, "__code__", getattr(called, "__code__", None))
    return code if isinstance(code, CodeType) else None


def raised_at(error: BaseException, file: Path) -> str:
    """The innermost line of ``file`` that ``error`` came through; else ``file`` itself."""
    file = file.resolve()
    if isinstance(error, SyntaxError) and error.filename == str(file) and error.lineno:
        return f"{file}:{error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == file
    ]
    return f"{file}:{lines[-1]}" if lines else str(file)


def describe(error: BaseException) -> str:
    """Type and message on one line; of a syntax error without the place, which is said apart."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(message.split())}".removesuffix(": ")


class NoPythonFile(ImportError):
    """A file whose name does not end as Python's do."""


class FileRaises(ImportError):
    """A file that raised while it was run: ``where`` (``file:line``), ``what``, the ``remedy``."""

    def __init__(self, where: str, what: str, remedy: str) -> None:
        super().__init__(f"{where}: {what}; {remedy}")
        self.where, self.what, self.remedy = where, what, remedy


def run_file(file: Path, module_name: str) -> ModuleType:
    """Runs a user's file as the module ``module_name``, which dataclasses and pickle look up.

    Raises ``NoPythonFile``, ``FileRaises``.
    """
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise NoPythonFile(str(file))
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (KeyboardInterrupt, EndedBySignal):
        raise
    except BaseException as error:  # users' code may raise anything
        del sys.modules[module_name]
        remedy = "correct the file"
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            remedy += f", or install {package} in the trainer's environment"
        raise FileRaises(raised_at(error, file), describe(error), remedy) from error
    return module
