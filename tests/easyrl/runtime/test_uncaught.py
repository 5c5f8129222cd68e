"""What a script prints of an exception that nobody catches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
from easyrl.runtime.uncaught import tell_in_short

def fail(told):
    error = ValueError("model: is not there; name another")
    if told:
        tell_in_short(error)
    raise error

def other():
    tell_in_short(ValueError("another"))
    raise KeyError("ours")

{call}
"""


def printed(folder: Path, call: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(call=call))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and not ended.stdout
    return ended.stderr.splitlines()


def test_the_message_and_the_line_of_the_script_that_called(tmp_path: Path) -> None:
    said, where = printed(tmp_path, "fail(True)")
    assert said == "easyrl: model: is not there; name another"
    line = SCRIPT.splitlines().index("{call}") + 1
    assert where == f"  (called in {tmp_path / 'script.py'}:{line})"


def test_any_other_exception_is_printed_as_python_does(tmp_path: Path) -> None:
    assert printed(tmp_path, "other()")[-1] == "KeyError: 'ours'"
    assert printed(tmp_path, "fail(False)")[0] == "Traceback (most recent call last):"
