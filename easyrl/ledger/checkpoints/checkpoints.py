"""Saves and restores a run: a copy to the host at once, the writing beside the training."""

from __future__ import annotations

import base64
import json
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import KW_ONLY, InitVar, asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from easyrl.engines.base import Snapshot, TrainEngine
from easyrl.engines.state_file import StateReader
from easyrl.ledger.checkpoints.folder import CheckpointFolder, Damaged, problems_of, read_manifest
from easyrl.metrics.event_log import Record, ignore
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.durable_files import remedy
from easyrl.schema import LedgerError

CLOSE_TIMEOUT_S = 60.0  # for the writing that is under way when a run ends by an error

logger = logging.getLogger(__name__)


class CheckpointError(LedgerError):
    """A checkpoint could not be written; those before it are as they were."""

    is_temporary = True


@dataclass
class Checkpoints:
    """``<directory>/step-N`` (``folder.py``): each rank's share of the state and a manifest.

    A context manager: left without an error it waits for what is being written.
    """

    directory: InitVar[Path]
    keep: int  # as many stay, the newest
    engine: TrainEngine
    collectives: Collectives
    # write in a thread while training goes on; else ``save`` returns when all is on disk
    background: bool
    _: KW_ONLY
    record: Record = ignore  # receives ``checkpoint_copied`` and ``checkpoint_written``
    _writing: Future[None] | None = field(default=None, init=False)

    def __post_init__(self, directory: Path) -> None:
        self.folder = CheckpointFolder(directory)
        # The training's own collectives go on meanwhile, so the writers have a group of their own.
        self._between_writers = Collectives(self.collectives.ranks)

    @property
    def is_writing(self) -> bool:
        """In the background. From any thread."""
        writing = self._writing
        return writing is not None and not writing.done()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copies the run to host memory and begins to write it. All ranks call it.

        Waits for the one before. ``state`` is JSON, rank 0's counts. Raises ``CheckpointError`` if
        the one before, or without ``background`` this one, could not be written on some rank.
        """
        self.wait()
        start = time.monotonic()
        state = json.loads(json.dumps(state))  # as it is now
        snapshot = self.engine.snapshot()
        generators = random_state()
        self.record("checkpoint_copied", step=step, seconds=time.monotonic() - start)
        if not self.background:
            self._write(step, state, snapshot, generators)
            return
        writing = self._writing = Future()

        def write() -> None:
            try:
                self._write(step, state, snapshot, generators)
                writing.set_result(None)
            except BaseException as error:  # raised where somebody can act on it
                writing.set_exception(error)

        # a daemon: a disk that hangs does not keep the process
        threading.Thread(target=write, name="checkpoint", daemon=True).start()

    def wait(self) -> None:
        """Until the last ``save`` is on disk. Raises ``CheckpointError`` if it is not, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load_latest(self, *, at_most: int | None = None) -> dict[str, Any] | None:
        """Restores engine and random state from the newest good checkpoint; its ``state``, or None.

        Of step ``at_most`` or an earlier one. Collective. Damaged ones are skipped with a warning
        that names the file. The random state is restored if the number of ranks is that of the
        checkpoint. Raises ``ValueError`` if all are damaged, or the newest good one does not fit
        the engine.
        """
        steps = [s for s in self.folder.steps() if at_most is None or s <= at_most]
        steps = self.collectives.broadcast(steps)
        skipped = []
        for step in reversed(steps):
            folder = self.folder.path(step)
            record, problems = self._checked(folder)
            if record is not None and not problems:
                self._restore(folder, record)
                return record["state"]
            skipped += problems
            if self.collectives.ranks.dp_rank == 0:
                logger.warning("%s is damaged, it is skipped: %s", folder, "; ".join(problems))
        if skipped:
            raise ValueError(
                f"no checkpoint in {self.folder.directory} can be used: {'; '.join(skipped)}; "
                "bring one back from a copy, or remove them all to begin with the initial model"
            )
        return None

    def close(self) -> None:
        """Gives what is being written some time; tells of a failure in the log only."""
        try:
            if self._writing is not None and not wait([self._writing], CLOSE_TIMEOUT_S).done:
                logger.warning("a checkpoint was not written within %.0f s", CLOSE_TIMEOUT_S)
                return
            self.wait()
        except (LedgerError, RuntimeError) as error:  # the group's, when another rank is gone
            logger.error("the last checkpoint: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.wait()
        else:
            self.close()

    # ---- writing: in the thread ------------------------------------------------------------------

    def _write(
        self, step: int, state: dict[str, Any], snapshot: Snapshot, generators: dict[str, Any]
    ) -> None:
        """All ranks write, then rank 0 gives the folder its name."""
        start = time.monotonic()
        rank, num_ranks = self._between_writers.ranks.dp_rank, self._between_writers.ranks.dp_size
        stem = f"rank-{rank:05d}-of-{num_ranks:05d}"

        def begin() -> None:
            if rank == 0:
                self.folder.begin(step)

        def write() -> list[dict[str, Any]]:
            return [asdict(file) for file in snapshot.write(self.folder.unfinished(step), stem)]

        def finish() -> None:
            if rank == 0:
                self.folder.finish(
                    step,
                    {
                        "step": step,
                        "state": state,
                        "engine": dict(snapshot.description),
                        "files": {file.pop("name"): file for file in files},
                        "random_states": random_states,
                    },
                )
                self.folder.prune(step, self.keep)

        try:
            self._on_all_ranks(step, begin)
            files = [file for written in self._on_all_ranks(step, write) for file in written]
            random_states = self._between_writers.all_gather(generators)
            self._on_all_ranks(step, finish)
        except CheckpointError:
            if rank == 0:
                self.folder.discard(step)
            raise
        num_bytes = sum(file["num_bytes"] for file in files)
        seconds = time.monotonic() - start
        self.record("checkpoint_written", step=step, num_bytes=num_bytes, seconds=seconds)

    def _on_all_ranks(self, step: int, work: Callable[[], Any]) -> list[Any]:
        """Every rank's result. Raises ``CheckpointError`` on all ranks if one of them fails."""
        result, problem = None, None
        try:
            result = work()
        except OSError as error:
            problem = error
        outcomes = self._between_writers.all_gather([problem and str(problem), result])
        failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text]
        if failed:
            good = self.folder.steps()
            raise CheckpointError(
                f"checkpoint of step {step} was not written: {'; '.join(failed)}; "
                f"{remedy(problem or OSError())} and go on with --resume, from "
                + (f"step {good[-1]}" if good else "the start")
            ) from problem
        return [result for _, result in outcomes]

    # ---- reading ---------------------------------------------------------------------------------

    def _checked(self, folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
        """The manifest and what is wrong with the checkpoint; each rank reads some of its files."""
        rank, num_ranks = self.collectives.ranks.dp_rank, self.collectives.ranks.dp_size
        record = None
        try:
            record = read_manifest(folder)
            problems = problems_of(folder, record, sorted(record["files"])[rank::num_ranks])
        except Damaged as error:
            problems = [str(error)]
        return record, sorted({p for found in self.collectives.all_gather(problems) for p in found})

    def _restore(self, folder: Path, record: dict[str, Any]) -> None:
        files = [folder / name for name in sorted(record["files"])]
        with closing(StateReader(files, record["engine"])) as reader:
            self.engine.restore(reader)
        states = record["random_states"]
        if len(states) == self.collectives.ranks.dp_size:
            restore_random_state(states[self.collectives.ranks.dp_rank])


# ---- the state of all generators of this process, as JSON ---------------------------------------


def random_state() -> dict[str, Any]:
    """State of Python's, NumPy's and torch's generators, the accelerator's included."""
    version, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, _text(np.array(internal, dtype=np.uint32)), gauss],
        "numpy": [_text(np.asarray(keys)), int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state().numpy()),
    }
    if torch.accelerator.is_available():
        state["accelerator"] = _text(torch.get_device_module().get_rng_state().numpy())
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Inverse of ``random_state``; an accelerator that was not there then keeps its own."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(_array(internal, np.uint32).tolist()), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", _array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.from_numpy(_array(state["torch"], np.uint8)))
    if "accelerator" in state and torch.accelerator.is_available():
        value = torch.from_numpy(_array(state["accelerator"], np.uint8))
        torch.get_device_module().set_rng_state(value)


def _text(values: NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _array(text: str, dtype: type) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype).copy()
