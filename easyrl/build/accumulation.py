"""The accumulator as the configuration wants it: the same for a run and for its replay."""

from __future__ import annotations

from collections.abc import Callable

import psutil

from easyrl.build.recipe import group_functions
from easyrl.config import Config, ConfigError
from easyrl.config.trainer import no_look_ahead
from easyrl.engines.base import TrainEngine
from easyrl.engines.megatron.layout import Layout
from easyrl.inference_client.errors import is_outage
from easyrl.memory_plan.plan import plan_memory
from easyrl.metrics.event_log import Record
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.determinism import is_strict
from easyrl.runtime.phase_clock import PhaseClock
from easyrl.runtime.shared_cores import SharedCores
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import (
    BatchWithdrawn,
    GatewayGone,
    NoEndpointServes,
    PeerOutage,
    RewardError,
    StoppedByAlarm,
    StopRequested,
    TooManyExcluded,
)
from easyrl.trainer.accumulation import Accumulator
from easyrl.trainer.loop import NothingAccepted

# With groups of a third of a row, takes of 8 rows need 11 % fewer rows than takes of one (simulated
# log-normal sizes), and the costs of rows vary half as much.
ROWS_PER_DRAIN = 8
MOST_OF_MEMORY = 1 / 8  # of the machine's, for rows that are trained beside one another


def build_accumulator(
    config: Config,
    engine: TrainEngine,
    collectives: Collectives,
    stop: StopRequest,
    *,
    record: Record,
    synchronous: bool,
    agreement_limit: float | None = None,
    cores: SharedCores | None = None,
    clock: PhaseClock | None = None,
    samples_per_step: int = 0,
    on_trained: Callable[[float, int], object] = lambda seconds, num_groups: None,
) -> Accumulator:
    """What is left to the caller is who listens, whether all groups are waited for, and judged."""
    cores = cores or SharedCores()
    return Accumulator(
        engine=engine,
        collectives=collectives,
        functions=group_functions(config),
        stop=stop,
        is_interruption=is_interruption,
        record=record,
        max_tokens=config.trainer.max_tokens_per_micro_batch,
        rows_per_drain=rows_per_drain(config),
        rows_at_once=max(
            rows_at_once(config),
            1 if engine.lockstep else rows_by_thread(config, cores),  # as many on all ranks
        ),
        synchronous=synchronous,
        agreement_limit=agreement_limit,
        on_trained=on_trained,
        look_ahead=looks_ahead(config, engine),
        # Which of them is run depends on the endpoint that answered, and decides the last bits.
        skip_without_signal=not is_strict(config),
        cores=cores,
        clock=clock or PhaseClock(),
        samples_per_step=samples_per_step,
    )


def is_interruption(error: Exception) -> bool:
    """Whether the run ends for now with sound weights."""
    ends = StopRequested | PeerOutage | BatchWithdrawn | NoEndpointServes | GatewayGone
    rules = TooManyExcluded | StoppedByAlarm | RewardError | NothingAccepted
    return is_outage(error) or isinstance(error, ends | rules)


def looks_ahead(config: Config, engine: TrainEngine) -> bool:
    """Where ``trainer.look_ahead`` can act; not where ranks are in lock-step.

    There a rank that computes a piece of work has all others wait for its next row.
    """
    wanted = config.trainer.look_ahead and no_look_ahead(config.trainer, config.run) is None
    return wanted and engine.can_look_ahead and not engine.lockstep


def rows_per_drain(config: Config) -> int:
    """Micro-batches' worth of ready groups that are packed together.

    In strict mode a take waits for each of its groups: as few as keep the model busy.
    """
    if not is_strict(config):
        return ROWS_PER_DRAIN
    return config.parallel.pipeline if _has_flushes(config) else 1


def rows_at_once(config: Config) -> int:
    """Micro-batches of one call of the engine."""
    return rows_per_drain(config) if _has_flushes(config) else 1


def rows_by_thread(config: Config, cores: SharedCores) -> int:
    """Micro-batches that a CPU trains beside one another where it has several cores at a time: as
    many as ``cores`` divides, if there is memory for so many, and as are drained together."""
    if config.parallel.is_split or not cores or cores.num_cores == 1:
        return 1
    try:
        plan = plan_memory(config, 1, on_cpu=True)
    except ConfigError:  # a model whose sizes are not known
        return 1
    of_a_row = max(stage.running_bytes for stage in plan.stages)
    machine = psutil.virtual_memory().total
    return max(1, min(cores.num_cores, ROWS_PER_DRAIN, int(MOST_OF_MEMORY * machine / of_a_row)))


def _has_flushes(config: Config) -> bool:
    """Whether a pipeline has a schedule for each set of micro-batches that it is given."""
    layout = Layout.of(config.parallel, config.parallel.ranks_per_model)
    return layout.pipeline > 1 and not layout.is_open_schedule
