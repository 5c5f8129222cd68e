"""The recipe's functions of finished groups, and how these are packed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np

from easyrl.build.control import scored_function
from easyrl.build.row_settings import has_episodes, sharing
from easyrl.config import Config
from easyrl.dataloaders.packing.cost import cost_of_model_at
from easyrl.dataloaders.packing.groups import Packing, pack_groups
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.recipes.groups import group_statistics, trained_groups, without_advantages
from easyrl.recipes.loading import load_recipe, run_settings
from easyrl.recipes.masked import too_few_left, without_masked
from easyrl.recipes.recipe import Models, Recipe, RunSettings
from easyrl.runtime.determinism import is_strict
from easyrl.schema import (
    Completion,
    MicroBatch,
    RolloutGroup,
    SampleKey,
    TrainedGroup,
)
from easyrl.trainer.accumulation import GroupFunctions, PackRows
from easyrl.trainer.model_outputs import ResponseRows

PackFinished = Callable[[Sequence[RolloutGroup]], list[MicroBatch]]


def group_functions(config: Config) -> GroupFunctions:
    """What the trainer makes of finished groups."""
    recipe, run = load_recipe(config), run_settings(config)
    keep_order = is_strict(config)  # there, rows are a matter of the prompts' order
    needs = recipe.needs
    whole_groups = recipe.span == "group" or (recipe.span == "sequence" and has_episodes(config))
    pack = _pack_function(config, keep_order=keep_order, whole_groups=whole_groups)
    return GroupFunctions(
        scored=scored_function(config.scoring.shuffle_rewards, config.run.seed),
        trained=partial(trained_groups, recipe, run),
        denominator=lambda groups: recipe.denominator(list(map(without_masked, groups)), run),
        pack=pack,
        pack_finished=_pack_finished(pack, partial(recipe.trained_tokens, run=run)),
        dummy=dummy_micro_batch,
        scope=recipe.scope,
        batch_rewards=partial(group_statistics, recipe, run),
        advantage_only=recipe.advantage_only,
        initial_controls=recipe.initial_controls(),
        next_controls=recipe.next_controls,
        ask_first=response_rows(recipe, run, pack),
        value_denominator=(
            (lambda groups: recipe.value_denominator(list(map(without_masked, groups)), run))
            if needs.critic
            else None
        ),
    )


def response_rows(recipe: Recipe, run: RunSettings, pack: PackRows) -> ResponseRows | None:
    """Rows for the models that ``recipe`` asks before the advantages; None: it asks none."""
    if recipe.before_advantages == Models():
        return None
    trained_tokens = partial(recipe.trained_tokens, run=run)

    def unknown(group: RolloutGroup, known: Collection[SampleKey]) -> TrainedGroup:
        places = group.unmasked
        selected = [places[place] for place in recipe.select(without_masked(group), run)]
        whole = {key._replace(part=0) for key in known}  # all parts of an episode run together
        samples = [i for i in selected if SampleKey(*group.prompt.key, i) not in whole]
        return without_advantages(group, trained_tokens, samples)

    return ResponseRows(
        lambda groups, known: pack([unknown(group, known) for group in groups]), trained_tokens
    )


def accept_function(config: Config) -> Callable[[RolloutGroup], str | None]:
    """A finished group's reason to be replaced by the next prompt of the order, or None.

    The recipe's, or that masked responses leave too few to train.

    Raises ``RecipeFailed`` for whatever the recipe raises: it is called in a coroutine, which a
    ``CancelledError`` of a user's would end without a word, and a ``SystemExit`` with its loop.
    """
    recipe, run = load_recipe(config), run_settings(config)

    def accept(group: RolloutGroup) -> str | None:
        if (reason := too_few_left(recipe, group)) is not None:
            return reason
        try:
            return recipe.accepts(without_masked(group), run=run)
        except BaseException as error:
            prompt = group.prompt
            raise RecipeFailed(
                f"recipe {config.recipe.name}: accepts failed on prompt {prompt.index} of epoch "
                f"{prompt.epoch}: {type(error).__name__}: {error}"
            ) from error

    return accept


class RecipeFailed(RuntimeError):
    """A recipe's own code raised; the message names recipe, method and prompt."""


def pack_in_order(config: Config) -> PackFinished:
    """Packs all sampled tokens of groups, for rows that are only given log-probabilities."""
    return _pack_finished(_pack_function(config, keep_order=True), lambda c: c.loss_mask)


def _pack_function(config: Config, *, keep_order: bool, whole_groups: bool = False) -> PackRows:
    """``pack_groups`` as the configuration wants it, with the costs of its model."""
    return partial(
        pack_groups,
        max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
        packing=_packing(config),
        keep_order=keep_order,
        whole_groups=whole_groups,
        cost=cost_of_model_at(config.model.path),
    )


def _packing(config: Config) -> Packing:
    """``auto`` is decided as a run is opened (``row_settings``); elsewhere as if all models could
    have it."""
    if config.model.attention == "own":
        return "padded"
    return sharing(config)


def _pack_finished(
    pack: PackRows, trained_tokens: Callable[[Completion], np.ndarray]
) -> PackFinished:
    return lambda groups: pack([without_advantages(group, trained_tokens) for group in groups])
