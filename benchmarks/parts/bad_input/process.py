"""A command in a copy of a process that has imported everything already: what takes time is not
the import.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.parts.bad_input.rule import Outcome

KILLED = 128 + signal.SIGKILL


def import_everything(model: Path) -> None:
    """All that the command imports on its way, transformers' lazy modules too."""
    import pyarrow.parquet  # noqa: F401

    import easyrl.__main__
    import easyrl.build.parts
    import easyrl.build.replay
    import easyrl.ledger.verify
    import easyrl.train  # noqa: F401
    from easyrl.config import ModelConfig
    from easyrl.inference_client.servers.embedded import server  # noqa: F401
    from easyrl.models.loading import load_policy_model

    easyrl.__main__.command_line()
    load_policy_model(ModelConfig(path=model, dtype="fp32"))
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(model, local_files_only=True)


class ForkedCommand:
    """``easyrl ARGV`` (or ``python SCRIPT``) in a fork of this process, in ``folder``."""

    def __init__(
        self, argv: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float
    ) -> None:
        self.log = folder / "printed"
        self.began_s = time.monotonic()
        self.deadline_s = self.began_s + limit_s
        context = multiprocessing.get_context("fork")
        arguments = (list(argv), folder, dict(environment), self.log)
        self.process: BaseProcess = context.Process(target=_run, args=arguments)
        self.process.start()

    def outcome(self) -> Outcome | None:
        """None while it runs; it is killed at its limit."""
        if self.process.is_alive():
            if time.monotonic() < self.deadline_s:
                return None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid or 0, signal.SIGKILL)
            self.process.join()
        seconds = time.monotonic() - self.began_s
        status = self.process.exitcode
        assert status is not None
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return Outcome(128 - status if status < 0 else status, text, seconds)


def _run(argv: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    os.chdir(folder)
    program, *rest = argv
    if program == "python":
        sys.argv = rest
        try:
            runpy.run_path(rest[0], run_name="__main__")
        except Exception as error:  # a fork would print it in its own way, not as Python does
            stack = error.__traceback__
            while stack is not None and stack.tb_frame.f_code.co_filename != rest[0]:
                stack = stack.tb_next  # what a user's process has not
            sys.excepthook(type(error), error, stack)
            sys.exit(1)
        return
    sys.argv = ["easyrl", *argv]
    from easyrl.__main__ import main

    main()
