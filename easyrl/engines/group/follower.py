"""A process of a model-parallel group that is not its head: it repeats the head's calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from easyrl.engines.base import Snapshot
from easyrl.engines.group.calls import ANSWERED, END, perform
from easyrl.engines.group.channel import GroupChannel
from easyrl.engines.group.leader import SplitEngine
from easyrl.engines.state_file import StateReader
from easyrl.runtime.shared_folder import appears

# Writes weights as a request says, and what it has to tell of them.
WriteShare = Callable[[Iterator[tuple[str, Tensor]], dict[str, Any], Callable[[Any], object]], None]


class Follower:
    """Serves the calls of a ``GroupLeader``.

    Args:
        engine: this process's part.
        teller: rank of the process that answers with what the model says.
        write_share: writes this stage's weights for the endpoints; None: another process does.
    """

    def __init__(
        self,
        engine: SplitEngine,
        calls: GroupChannel,
        files: GroupChannel,
        teller: int,
        write_share: WriteShare | None = None,
    ) -> None:
        self._write_share = write_share
        self._engine = engine
        self._calls = calls
        self._is_teller = dist.get_rank() == teller
        self._perturbed = ExitStack()
        self._writer = SnapshotWriter(files)

    def serve(self) -> None:
        """Until the head ends it. Raises ``RuntimeError`` where the head is gone."""
        self._writer.start()
        while (message := self._calls.hear())[0] != END:
            self._serve(*message)
        self._writer.join()

    def _serve(self, call: str, arguments: tuple[Any, ...]) -> None:
        match call:
            case "named_weights":
                for _ in self._engine.named_weights(*arguments):
                    pass
            case "sees":
                (file,) = arguments
                self._calls.answer(appears(Path(file)))
            case "write_share":
                self._share(*arguments)
            case "perturb":
                self._perturbed.enter_context(self._engine.perturbed_weights(*arguments))
            case "unperturb":
                self._perturbed.close()
            case "snapshot":
                (number,) = arguments
                self._writer.keep(number, self._engine.snapshot())
            case "restore":
                self._calls.answer(self._restore(*arguments))
            case _:
                result = perform(self._engine, call, arguments)
                if self._is_teller and call in ANSWERED:
                    self._calls.answer(result)

    def _share(self, request: dict[str, Any]) -> None:
        """The head, which writes its own, takes what is told when it comes to it."""
        weights = self._engine.stage_weights()
        if self._write_share is None:
            for _ in weights:
                pass
            return
        with ThreadPoolExecutor(1, "easyrl-share") as telling:
            told: list[Future[None]] = []

            def say(message: Any) -> None:
                told.append(telling.submit(self._calls.answer, message))

            self._write_share(weights, request, say)
            say(None)
        for each in told:
            each.result()

    def _restore(self, files: tuple[str, ...], description: dict[str, Any]) -> str | None:
        """Why it cannot be."""
        with closing(StateReader([Path(file) for file in files], description)) as saved:
            try:
                self._engine.restore(saved)
            except ValueError as error:
                return str(error)
        return None


class SnapshotWriter:
    """Writes a follower's snapshots when the head's thread of checkpoints asks for them."""

    def __init__(self, files: GroupChannel) -> None:
        self._files = files
        self._kept: dict[int, Snapshot] = {}  # by number; of a checkpoint that failed one may stay
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="checkpoint", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """The head asks for no more."""
        self._thread.join()

    def keep(self, number: int, snapshot: Snapshot) -> None:
        """Until it is asked for; those before it are not asked for any more."""
        with self._changed:
            self._kept = {number: snapshot}
            self._changed.notify()

    def _serve(self) -> None:
        while (wanted := self._files.hear()) is not None:
            number, folder, stem = wanted
            with self._changed:  # the head's copy may have been made before this process's
                while number not in self._kept:
                    self._changed.wait()
                snapshot = self._kept.pop(number)
            problem, files = None, []
            try:
                files = snapshot.write(Path(folder), f"{stem}-process-{dist.get_rank():05d}")
            except OSError as error:
                problem = f"rank {dist.get_rank()}: {error}"
            del snapshot
            self._files.answer((problem, files))
