"""The accumulator as the configuration wants it: the same for a run and for its replay."""

from __future__ import annotations

from collections.abc import Callable

from easyrl.build.recipe import group_functions, rows_per_drain
from easyrl.config import Config
from easyrl.config.trainer import no_look_ahead
from easyrl.engines.base import TrainEngine
from easyrl.metrics.event_log import Record
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.determinism import is_strict
from easyrl.runtime.stopping import StopRequest
from easyrl.trainer.accumulation import Accumulator


def build_accumulator(
    config: Config,
    engine: TrainEngine,
    collectives: Collectives,
    stop: StopRequest,
    *,
    is_interruption: Callable[[Exception], bool],
    record: Record,
    synchronous: bool,
) -> Accumulator:
    """What is left to the caller is who may interrupt, who listens, and what is waited for."""
    return Accumulator(
        engine=engine,
        collectives=collectives,
        functions=group_functions(config),
        stop=stop,
        is_interruption=is_interruption,
        record=record,
        max_tokens=config.trainer.max_tokens_per_micro_batch,
        rows_per_drain=rows_per_drain(config),
        synchronous=synchronous,
        look_ahead=looks_ahead(config, engine),
        # Which of them is run depends on the endpoint that answered, and decides the last bits.
        skip_without_signal=not is_strict(config),
    )


def looks_ahead(config: Config, engine: TrainEngine) -> bool:
    """Where ``trainer.look_ahead`` can act; not where ranks are in lock-step.

    There a rank that computes a piece of work has all others wait for its next row.
    """
    reason = no_look_ahead(config.trainer, config.run)
    wanted = config.trainer.look_ahead and reason is None
    return wanted and engine.can_look_ahead and not engine.lockstep
