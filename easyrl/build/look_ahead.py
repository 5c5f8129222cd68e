"""Whether a run looks ahead (``easyrl/trainer/look_ahead.py``)."""

from __future__ import annotations

from easyrl.config import Config
from easyrl.config.trainer import no_look_ahead
from easyrl.engines.base import TrainEngine


def looks_ahead(config: Config, engine: TrainEngine) -> bool:
    """Where ``trainer.look_ahead`` can act; not where ranks are in lock-step.

    There a rank that computes a piece of work has all others wait for its next row.
    """
    reason = no_look_ahead(config.trainer, config.run)
    wanted = config.trainer.look_ahead and reason is None
    return wanted and engine.can_look_ahead and not engine.lockstep
