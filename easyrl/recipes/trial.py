"""A trial of a user's recipe on one group, before the run's model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easyrl.config import ConfigError
from easyrl.recipes.groups import group_statistics, trained_groups
from easyrl.recipes.losses import terms_of
from easyrl.recipes.recipe import Recipe, RunSettings
from easyrl.recipes.value_losses import value_loss
from easyrl.runtime.user_code import definition, describe, raised_at
from easyrl.schema import (
    EndedBySignal,
    FrozenLogprobs,
    GroupOutputs,
    MicroBatch,
    RolloutGroup,
    TrainedGroup,
)

Pack = Callable[[Sequence[TrainedGroup]], list[MicroBatch]]


def try_recipe(
    recipe: Recipe, file: Path, run: RunSettings, group: RolloutGroup, pack: Pack
) -> None:
    """Calls every method of ``recipe``, the class of a user's ``file``, as the run will.

    ``group`` has scores that differ. Raises ``ConfigError`` naming the method with its file and
    line where one raises or returns what the trainer cannot use.
    """
    trial = _Trial(recipe, file)
    with trial.calling("accepts"):
        reason = recipe.accepts(group, run=run)
    if reason is not None and not isinstance(reason, str):
        trial.refuse("accepts", f"returned {reason!r:.40}", "None or the reason as a text")
    asked = ("advantages", "token_weights", "select", "trained_tokens", "batch_rewards")
    with trial.calling(*asked, "batch_statistics", "returns"):
        said = _made_up_outputs(group)
        statistics = [group_statistics(recipe, run, group, said)]
        trained = trained_groups(recipe, run, [group], statistics, [said])
    for response in trained[0].responses:
        for method, values in (
            ("advantages", response.advantages),
            ("token_weights", response.loss_weights),
        ):
            if not np.issubdtype(values.dtype, np.number) or not np.isfinite(values).all():
                trial.refuse(method, f"returned {values!r:.60}", "finite numbers")
    with trial.calling("denominator"):
        denominator = recipe.denominator([group], run=run)
    if not trained[0].responses:
        return
    if not np.isfinite(denominator) or denominator <= 0:
        trial.refuse("denominator", f"returned {denominator!r:.40}", "a positive number")
    for row in pack(trained):
        if recipe.needs.critic:
            _try_value_loss(trial, recipe, row)
        _try_loss(trial, recipe, row)


def _try_loss(trial: _Trial, recipe: Recipe, row: MicroBatch) -> None:
    size = row.num_loss_tokens
    logprobs = torch.linspace(-2.0, -0.5, size).requires_grad_()
    entropy = torch.linspace(0.5, 1.0, size).requires_grad_()
    reference = torch.full((size,), -1.1) if recipe.needs.reference else None
    needs = recipe.needs
    scored = torch.full((size,), -1.2) if needs.scores_with_teacher else None
    is_full = needs.teacher is not None and needs.teacher.full
    kl = torch.linspace(0.1, 0.5, size).requires_grad_() if is_full else None
    terms = terms_of(row, FrozenLogprobs(reference, None, teacher=scored), logprobs, teacher_kl=kl)
    with trial.calling("loss"):
        loss = recipe.loss(logprobs, entropy, terms)
    wanted = f"a tensor of {size} terms, one per trained token, with gradient"
    if recipe.span != "token":
        wanted = "a tensor of terms with gradient"
    if not isinstance(loss, Tensor):
        trial.refuse("loss", f"returned {type(loss).__name__}", wanted)
    if recipe.span == "token" and loss.shape != (size,):
        trial.refuse("loss", f"returned a tensor of shape {list(loss.shape)}", wanted)
    if not loss.requires_grad:
        trial.refuse("loss", "returned a tensor without gradient", wanted)
    if not bool(torch.isfinite(loss).all()):
        trial.refuse("loss", "returned values that are not finite", "finite numbers")
    with trial.calling("metrics"), torch.no_grad():
        terms = replace(terms, teacher_kl=None if kl is None else kl.detach())
        metrics = recipe.metrics(logprobs.detach(), entropy.detach(), terms)
    for name, value in metrics.items():
        if not name.endswith(("_sum", "_num", "_max")):
            trial.refuse("metrics", f"returned {name!r}", "a name that ends in _sum, _num or _max")
        if not isinstance(value, Tensor) or value.ndim != 0:
            trial.refuse("metrics", f"returned {value!r:.40} as {name}", "a scalar tensor")


def _try_value_loss(trial: _Trial, recipe: Recipe, row: MicroBatch) -> None:
    values = torch.linspace(-0.5, 0.5, row.num_loss_tokens).requires_grad_()
    with trial.calling("value_loss", "value_metrics"):
        loss, _ = value_loss(
            values,
            replace(row, frozen=FrozenLogprobs(None, None, torch.zeros_like(values))),
            recipe,
        )
    if not loss.requires_grad or not bool(torch.isfinite(loss)):
        trial.refuse("value_loss", "returned no finite tensor with gradient", "one, of n terms")


def _made_up_outputs(group: RolloutGroup) -> GroupOutputs:
    """Values of zero, and a reference that agrees with the endpoint."""
    values = tuple(np.zeros(len(c.token_ids), np.float32) for c in group.completions)
    return GroupOutputs(values, tuple(c.logprobs for c in group.completions))


class _Trial:
    """Says of a recipe's methods what was wrong, and where they are."""

    def __init__(self, recipe: Recipe, file: Path) -> None:
        self.recipe, self.file = recipe, file

    @contextmanager
    def calling(self, *methods: str) -> Iterator[None]:
        """What is raised inside is one of the ``methods``' fault: that which raised, or which the
        message of ``trained_groups`` names.
        """
        try:
            yield
        except (KeyboardInterrupt, EndedBySignal):
            raise
        except BaseException as error:  # users' code may raise anything
            where = raised_at(error, self.file)
            said = describe(error)
            method = next((name for name in methods if f".{name}" in str(error)), methods[0])
            if where == str(self.file.resolve()):  # not in the user's code
                where = self._definition(method)
            self._refuse(where, method, f"raised {said}", "correct it")

    def refuse(self, method: str, what: str, wanted: str) -> None:
        self._refuse(self._definition(method), method, what, f"return {wanted}")

    def _refuse(self, where: str, method: str, what: str, remedy: str) -> None:
        names = ", ".join(inspect.signature(getattr(Recipe, method)).parameters)
        raise ConfigError(
            f"recipe.file: {where}: {type(self.recipe).__name__}.{method}({names}) {what} in a "
            f"trial on one group; {remedy}"
        ) from None

    def _definition(self, method: str) -> str:
        function: Any = getattr(type(self.recipe), method)
        return definition(function) or str(self.file.resolve())
