"""What of a run a tracker already has, kept in the run's folder from one attempt to the next."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from easyrl.metrics.trackers.base import Tracker
from easyrl.runtime.durable_files import write_durably

logger = logging.getLogger(__name__)

FOLDER = "trackers"  # of the run's folder
# what comes later than its step, beside all that begins with "eval/"
EVALUATION_TIMES = ("time/evaluation_s", "time/evaluation_wait_s")


class _Kept(msgspec.Struct):
    run_id: str | None = None
    last_step: int = -1
    last_evaluation: int = -1
    # before these, that did not get there: a resumed run that takes them again logs them
    missed_steps: list[int] = []
    missed_evaluations: list[int] = []


class TrackerState:
    """One tracker's file: the id of its run there, and the last steps that it was told of.

    A file that cannot be read is told of; the tracker then begins a run of its own.
    """

    def __init__(self, output: Path, tracker: str) -> None:
        self._file = output / FOLDER / f"{tracker}.json"
        self._kept = _Kept()
        try:
            self._kept = msgspec.json.decode(self._file.read_bytes(), type=_Kept)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("%s: %s; %s begins a new run there", self._file, error, tracker)

    @property
    def run_id(self) -> str | None:
        """Of the service's run; None: it has none yet."""
        return self._kept.run_id

    def keep_run(self, run_id: str) -> None:
        """Raises ``OSError`` naming the file."""
        self._kept.run_id = run_id
        self._write()

    def untold(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Those of ``metrics`` that an attempt before has not logged already."""
        kept = self._kept
        is_new = step > kept.last_step or step in kept.missed_steps
        is_new_late = step > kept.last_evaluation or step in kept.missed_evaluations
        return {
            name: value
            for name, value in metrics.items()
            if (is_new_late if _is_late(name) else is_new)
        }

    def told(self, step: int, metrics: dict[str, float]) -> None:
        """The service has ``metrics``. Raises ``OSError`` naming the file."""
        kept = self._kept
        if any(_is_late(name) for name in metrics):
            kept.last_evaluation = max(step, kept.last_evaluation)
            kept.missed_evaluations = [each for each in kept.missed_evaluations if each != step]
        if not all(_is_late(name) for name in metrics):
            kept.last_step = max(step, kept.last_step)
            kept.missed_steps = [each for each in kept.missed_steps if each != step]
        self._write()

    def missed(self, step: int, metrics: dict[str, float]) -> None:
        """The service has not got ``metrics``; in the file with the next ones that it gets."""
        kept, untold = self._kept, self.untold(step, metrics)
        if any(_is_late(name) for name in untold):
            kept.missed_evaluations = sorted({*kept.missed_evaluations, step})
        if not all(_is_late(name) for name in untold):
            kept.missed_steps = sorted({*kept.missed_steps, step})

    def _write(self) -> None:
        self._file.parent.mkdir(exist_ok=True)
        write_durably(self._file, msgspec.json.encode(self._kept).decode())


class ContinuedTracker:
    """A tracker that cannot take back what it was told: no step is logged a second time.

    A step that a resumed run takes again keeps the numbers of the attempt before.
    """

    def __init__(self, tracker: Tracker, state: TrackerState) -> None:
        self._tracker, self._state = tracker, state

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if metrics := self._state.untold(step, metrics):
            try:
                self._tracker.log(step, metrics)
            except Exception:  # of whatever library
                self._state.missed(step, metrics)
                raise
            self._state.told(step, metrics)

    def note(self, name: str, text: str) -> None:
        self._tracker.note(name, text)

    def close(self) -> None:
        self._tracker.close()


def _is_late(name: str) -> bool:
    return name.startswith("eval/") or name in EVALUATION_TIMES
