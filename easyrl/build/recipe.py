"""The recipe's functions of finished groups and the accumulator that calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from easyrl.config import Config
from easyrl.config.trainer import no_look_ahead
from easyrl.dataloaders.packing.cost import cost_of_model_at
from easyrl.dataloaders.packing.groups import pack_groups
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.engines.base import TrainEngine
from easyrl.inference_client.errors import is_outage
from easyrl.metrics.event_log import Record
from easyrl.recipes.groups import trained_groups, without_advantages
from easyrl.recipes.loading import load_recipe, run_settings
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.determinism import is_strict
from easyrl.runtime.seeding import sample_seed
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import (
    BatchWithdrawn,
    Completion,
    MicroBatch,
    PeerOutage,
    RolloutGroup,
    StopRequested,
    TrainedGroup,
)
from easyrl.trainer.accumulation import Accumulator, GroupFunctions

# With groups of a third of a row, takes of 8 rows need 11 % fewer rows than takes of one (simulated
# log-normal sizes), and the costs of rows vary half as much.
ROWS_PER_DRAIN = 8

Pack = Callable[[Sequence[TrainedGroup]], list[MicroBatch]]
PackFinished = Callable[[Sequence[RolloutGroup]], list[MicroBatch]]


def build_accumulator(
    config: Config,
    engine: TrainEngine,
    collectives: Collectives,
    stop: StopRequest,
    *,
    record: Record,
    synchronous: bool,
) -> Accumulator:
    """What is left to the caller is who listens, and whether all groups are waited for."""
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


def is_interruption(error: Exception) -> bool:
    """Whether the run ends for now with sound weights."""
    return is_outage(error) or isinstance(error, StopRequested | PeerOutage | BatchWithdrawn)


def looks_ahead(config: Config, engine: TrainEngine) -> bool:
    """Where ``trainer.look_ahead`` can act; not where ranks are in lock-step.

    There a rank that computes a piece of work has all others wait for its next row.
    """
    wanted = config.trainer.look_ahead and no_look_ahead(config.trainer, config.run) is None
    return wanted and engine.can_look_ahead and not engine.lockstep


def group_functions(config: Config) -> GroupFunctions:
    """What the trainer makes of finished groups."""
    recipe, run = load_recipe(config), run_settings(config)
    keep_order = is_strict(config)  # there, rows are a matter of the prompts' order
    pack = _pack_function(config, keep_order=keep_order, whole_groups=recipe.span == "group")
    shuffled = partial(_with_shuffled_scores, seed=config.run.seed)
    return GroupFunctions(
        scored=shuffled if config.scoring.shuffle_rewards else lambda group: group,
        trained=partial(trained_groups, recipe, run),
        denominator=partial(recipe.denominator, run=run),
        pack=pack,
        pack_finished=_pack_finished(pack, partial(recipe.trained_tokens, run=run)),
        dummy=dummy_micro_batch,
        scope=recipe.scope,
        advantage_only=recipe.advantage_only,
    )


def accept_function(config: Config) -> Callable[[RolloutGroup], str | None]:
    """A finished group's reason to be replaced by the next prompt of the order, or None."""
    return partial(load_recipe(config).accepts, run=run_settings(config))


def rows_per_drain(config: Config) -> int:
    """Micro-batches' worth of ready groups that are packed together.

    One in strict mode, where a take waits for each of its groups.
    """
    return 1 if is_strict(config) else ROWS_PER_DRAIN


def pack_in_order(config: Config) -> PackFinished:
    """Packs all sampled tokens of groups, for rows that are only given log-probabilities."""
    return _pack_finished(_pack_function(config, keep_order=True), lambda c: c.loss_mask)


def _pack_function(config: Config, *, keep_order: bool, whole_groups: bool = False) -> Pack:
    """``pack_groups`` as the configuration wants it, with the costs of its model."""
    return partial(
        pack_groups,
        max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
        packing=config.trainer.packing,
        keep_order=keep_order,
        whole_groups=whole_groups,
        cost=cost_of_model_at(config.model.path),
    )


def _pack_finished(pack: Pack, trained_tokens: Callable[[Completion], np.ndarray]) -> PackFinished:
    return lambda groups: pack([without_advantages(group, trained_tokens) for group in groups])


def _with_shuffled_scores(group: RolloutGroup, seed: int) -> RolloutGroup:
    """``group`` with its scores permuted: the control experiment ``scoring.shuffle_rewards``."""
    key = sample_seed(seed, group.prompt.epoch, group.prompt.index, -1)
    order = np.random.default_rng(key).permutation(len(group.scores))
    return replace(group, scores=tuple(group.scores[place] for place in order))
