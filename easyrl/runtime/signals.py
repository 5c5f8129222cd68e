"""What SIGTERM, Ctrl-C and the launcher's end do to a run.

Python runs a signal's handler on the main thread when that is back from C, which a stuck collective
never is. So each signal also wakes a thread, through the descriptor that the C handler writes to.

On one node the ``deepspeed`` command does not pass SIGTERM on: it ends, and the processes that it
started go on without it. A scheduler that stops a job would leave the training running.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from easyrl.runtime.startup_signals import ENDING, say
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import EndedBySignal

UNWIND_S = 5.0  # for closing what a start has opened
BEFORE_TRAINING = "ended it before training began; start it again in the same way"
IN_TRAINING = "ended it at once; --resume goes on from the last checkpoint"
LAUNCHER_MODULE = "deepspeed.launcher.launch"
LAUNCHER_POLL_S = 0.5


class RunSignals:
    """Ends the run as its signals say. Not installed, it leaves all signals to the caller.

    SIGINT unwinds at once, so that every part closes what it opened. SIGTERM does too before
    ``begin_training``; from then on it asks for a stop, and further ones change nothing: a
    scheduler and a launcher may both send it. What unwinds says so in one sentence, on stderr.
    """

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop
        self._is_installed = False
        self._is_training = False
        self._raise: BaseException | None = None
        self._has_said = False
        self._ended_with: int | None = None  # by this process itself

    def install(self) -> None:
        """From now on, for good, signals come here. Call it on the main thread."""
        self._is_installed = True
        self._bytes, written = socket.socketpair()
        written.setblocking(False)
        signal.set_wakeup_fd(written.detach(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="easyrl-signals", daemon=True).start()
        for number in ENDING:
            signal.signal(number, self._handle)

    def begin_training(self) -> None:
        self._is_training = True

    def terminate(self, reason: str) -> None:
        """The same as SIGTERM, for a reason that the log will name. From any thread."""
        if self._is_training:
            self.stop.request(reason)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def end(self, status: int, within_s: float) -> None:
        """The main thread unwinds with ``status``; if it does not, the process ends. Any thread."""
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        if not self._is_installed:  # the process is somebody else's
            signal.pthread_kill(main_thread, signal.SIGINT)
            return
        self._ended_with = status
        self._raise = SystemExit(status)
        self._exit_after(within_s, status)
        signal.pthread_kill(main_thread, signal.SIGTERM)  # ends a blocking call, too

    def finish(self) -> None:
        """The stopped run has ended: one more signal must not change its exit status.

        Python gives signals back to the system before the process is gone, ignored ones not. A run
        that has ended itself leaves here: threads that wait in C for what does not come, a lost
        rank, would hold up the interpreter's end, or abort it.
        """
        if self._ended_with is not None:
            logging.shutdown()
            sys.stdout.flush()
            os._exit(self._ended_with)
        if self.stop.requested:
            self._ignore_all()

    def _handle(self, number: int, _: Any) -> None:
        if self._raise is None:
            if number == signal.SIGTERM and self._is_training:
                self.stop.request("SIGTERM")
                return
            self._raise = EndedBySignal(128 + number)
            self._say(number)
        self._ignore_all()  # a launcher sends both: the second must not interrupt the closing
        raise self._raise

    def _ignore_all(self) -> None:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    def _listen(self) -> None:
        while numbers := self._bytes.recv(64):
            if self._ended_with is not None:
                continue  # that signal is its own
            if not self._is_training:  # it may wait in C for ranks that never come
                self._exit_after(UNWIND_S, 128 + numbers[0], lambda: self._say(numbers[0]))
            elif signal.SIGTERM in numbers and self._raise is None:
                self.stop.request("SIGTERM")

    def _say(self, number: int) -> None:
        """Once, of whichever thread comes first."""
        if not self._has_said:
            self._has_said = True
            say(number, IN_TRAINING if self._is_training else BEFORE_TRAINING)

    @staticmethod
    def _exit_after(
        seconds: float, status: int, at_last: Callable[[], object] = lambda: None
    ) -> None:
        def end() -> None:
            at_last()
            os._exit(status)

        last_resort = threading.Timer(seconds, end)
        last_resort.daemon = True
        last_resort.start()


def end_with_launcher(terminate: Callable[[str], object]) -> None:
    """Calls ``terminate`` with the reason when the ``deepspeed`` command that started us, if one
    did, has ended.
    """
    launcher = psutil.Process().parent()
    if launcher is None or LAUNCHER_MODULE not in launcher.cmdline():
        return
    args = (launcher, launcher.ppid(), terminate)
    threading.Thread(target=_watch, args=args, name="easyrl-launcher-watch", daemon=True).start()


def _is_orphaned_to(command_pid: int) -> bool:
    """Whether it is what adopts orphans, and no ``deepspeed`` command of a container."""
    return command_pid == 1 and not any("deepspeed" in word for word in psutil.Process(1).cmdline())


def _watch(launcher: psutil.Process, command_pid: int, terminate: Callable[[str], object]) -> None:
    while not _is_orphaned_to(command_pid):  # it may have ended before this process looked
        try:
            if os.getppid() != launcher.pid or launcher.ppid() != command_pid:
                break
        except psutil.NoSuchProcess:
            break
        time.sleep(LAUNCHER_POLL_S)
    terminate("the deepspeed command that started this run has ended")
