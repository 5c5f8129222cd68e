"""What Python prints of an exception of ours that a user's script does not catch."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType


def tell_in_short(error: BaseException) -> None:
    """From now on ``error``, and nothing else, is printed without a stack if nobody catches it.

    Its message says what to mend, and the stack is ours; the line of the script is told. The exit
    status stays Python's.
    """
    others = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, stack: TracebackType | None) -> None:
        if value is not error:
            others(kind, value, stack)
            return
        print(f"easyrl: {value}", file=sys.stderr)
        for frame in traceback.extract_tb(stack, limit=1):
            print(f"  (called in {frame.filename}:{frame.lineno})", file=sys.stderr)

    sys.excepthook = hook
