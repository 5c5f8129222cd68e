"""A server as a separate process: start, stop, kill, start again on the same port."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, ClassVar, Self, cast

from easyrl.runtime.machine import pin_process
from easyrl.runtime.process_guard import ProcessGuard, kill_session

HOST = "127.0.0.1"
USAGE_ERROR = 2  # exit status
STOP_TIMEOUT_S = 15.0
TAIL_CHARACTERS = 3000
READY_LINE = re.compile(r"(http://127\.0\.0\.1:(\d+))\s")


class ServerStartError(RuntimeError):
    """A server did not come up; the message says why and shows the end of its log."""


@dataclass(kw_only=True, eq=False)
class ServerProcess(ABC):
    """A server on a loopback port, in a session of its own; a context manager.

    Whatever happens to this process, the server and all that it forked end with it.

    Raises ``ServerStartError`` if the server does not come up.
    """

    process: subprocess.Popen[bytes] = field(init=False, repr=False)  # the session's leader
    port: int | None = None  # None takes a free one
    cpus: Sequence[int] | None = None  # processors it may use; default: all
    env: Mapping[str, str] = field(default_factory=dict)  # further variables, over all others
    api_key: str | None = field(default=None, repr=False)  # that requests have to show; in the
    # server's environment, where only its own user can read it
    log: Path | None = None  # what it prints goes behind its end; default: a temporary file
    start_timeout_s: float = 120.0  # until it has to answer
    wait: bool = True  # return only when it answers; else ``wait_until_healthy`` later

    name: ClassVar[str] = "the server"
    health_timeout_s: ClassVar[float] = 5.0  # until it has to answer ``/health``

    def __post_init__(self) -> None:
        self._guard: ProcessGuard | None = None
        file = tempfile.TemporaryFile() if self.log is None else self.log.open("a+b")
        self._log_file = cast(BinaryIO, file)
        try:
            self._start(self.wait)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Base URL; known at once if a port was given, else when the server is up."""
        assert self.port is not None, "the port is known when the server is up"
        return f"http://{HOST}:{self.port}"

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _environment(self) -> dict[str, str]: ...

    def _explain(self, log: str) -> str:
        """The remedy, where the log shows a mistake that is known."""
        if "address already in use" in log.lower():
            return f"port {self.port} is in use by another process; give another one"
        return ""

    # ---- start and stop -------------------------------------------------------------------------

    def _start(self, wait: bool) -> None:
        if self.port is not None:
            try:
                socket.create_server((HOST, self.port)).close()
            except OSError as error:
                raise ServerStartError(
                    f"port {self.port} is in use by another process ({error.strerror}); "
                    "give another one"
                ) from error
        self._log_file.seek(0, os.SEEK_END)
        self._log_start = self._log_file.tell()
        guard = ProcessGuard()
        command = self._command()
        try:
            self.process = subprocess.Popen(
                command,
                stdout=self._log_file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment(),
                cwd=self._working_directory(),
                start_new_session=True,  # Ctrl-C is for the caller, who then stops the server
            )
        except OSError as error:
            guard.release()
            raise ServerStartError(f"{command[0]} cannot be run: {error}") from error
        guard.watch(self.process.pid)
        self._guard = guard
        if self.cpus:
            pin_process(self.process.pid, self.cpus)
        if wait:
            self.wait_until_healthy()

    def _working_directory(self) -> Path | None:
        return None

    def wait_until_healthy(self) -> None:
        """Returns when the server answers ``/health``. Raises ``ServerStartError``."""
        deadline = time.monotonic() + self.start_timeout_s
        what = f"did not answer within {self.start_timeout_s:.0f} s"
        while time.monotonic() < deadline:
            if self.has_ended:
                what = f"ended with status {self.process.returncode}"
                break
            if self.is_healthy():
                return
            time.sleep(0.1)
        raise ServerStartError(f"{self.name} {what}{self.failure_report()}")

    def is_healthy(self) -> bool:
        """Whether the server answers now."""
        if self.port is None:
            if (ready := READY_LINE.search(self._log_text())) is None:
                return False
            self.port = int(ready[2])
        connection = http.client.HTTPConnection(HOST, self.port, timeout=self.health_timeout_s)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    @property
    def has_ended(self) -> bool:
        """Whether the server's first process is gone."""
        return self.process.poll() is not None

    @property
    def refused_options(self) -> bool:
        """Whether it has ended because of its command line, as argparse and click end."""
        return self.process.returncode == USAGE_ERROR and "usage:" in self._log_text().lower()

    def stop(self) -> None:
        """Ends the server, gently first, and all that it forked. Safe to call twice."""
        if self._guard is not None and not self.has_ended:
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)  # a stopped process could not end
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
                self.process.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Kills the server and all that it forked at once, as a crash of its machine would."""
        if self._guard is None:
            return
        kill_session(self.process.pid)
        self.process.wait()
        self._guard.release()
        self._guard = None

    def restart(self, *, wait: bool = True) -> None:
        """Starts it again on the same port; what is left of the former start is stopped first."""
        self.stop()
        self._start(wait)

    def close(self) -> None:
        """Stops the server and closes its log."""
        self.stop()
        self._log_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- log ---------------------------------------------------------------------------------

    def failure_report(self) -> str:
        """What probably went wrong, if that is known, and the end of the log."""
        log = self._log_text()
        remedy = self._explain(log)
        head = f": {remedy}" if remedy else ""
        return f"{head}\n--- end of its log ---\n{log[-TAIL_CHARACTERS:]}"

    def last_line(self) -> str:
        """The last line of its log with a word in it."""
        lines = [line.strip(" \n│|") for line in self._log_text().splitlines()]
        return next((line for line in reversed(lines) if re.search(r"\w", line)), "said nothing")

    def _log_text(self) -> str:
        # pread: the server writes through the same file position
        size = os.fstat(self._log_file.fileno()).st_size
        start = max(self._log_start, size - 200_000)
        return os.pread(self._log_file.fileno(), size - start, start).decode(errors="replace")
