"""Exceptions on their way from a child process to its parent, with their traceback."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from dataclasses import dataclass


class RemoteTraceback(Exception):
    """The child's traceback, as the cause of the exception that it raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that can be pickled whatever its class."""

    pickled: bytes | None  # apart, since not every exception survives it
    description: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Of an exception that is being handled."""
        pickled = None
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(error)
        return cls(pickled, f"{type(error).__name__}: {error}", traceback.format_exc())

    def exception(self) -> Exception:
        """The exception, or a ``RuntimeError`` that describes it."""
        error: BaseException | None = None
        if self.pickled is not None:
            # The class may exist in the child only (a user's reward file), or refuse its own args.
            with contextlib.suppress(Exception):
                error = pickle.loads(self.pickled)
        # A SystemExit of a child must not end this process; a StopIteration cannot be awaited.
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            error = RuntimeError(self.description)
        error.__cause__ = RemoteTraceback(self.traceback)
        return error
