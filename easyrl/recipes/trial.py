"""A trial of a user's recipe on one group, before the run's model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easyrl.config import ConfigError
from easyrl.recipes.groups import trained_groups
from easyrl.recipes.losses import terms_of
from easyrl.recipes.recipe import Recipe, RunSettings
from easyrl.runtime.user_code import definition, describe, raised_at
from easyrl.schema import EndedBySignal, FrozenLogprobs, MicroBatch, RolloutGroup, TrainedGroup

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
    with trial.calling("advantages", "token_weights", "select", "trained_tokens", "batch_rewards"):
        trained = trained_groups(recipe, run, [group], [recipe.batch_rewards(group, run)])
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
        _try_loss(trial, recipe, row)


def _try_loss(trial: _Trial, recipe: Recipe, row: MicroBatch) -> None:
    size = row.num_loss_tokens
    logprobs = torch.linspace(-2.0, -0.5, size).requires_grad_()
    entropy = torch.linspace(0.5, 1.0, size).requires_grad_()
    reference = torch.full((size,), -1.1) if recipe.needs.reference else None
    terms = terms_of(row, FrozenLogprobs(reference, None), logprobs)
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
        metrics = recipe.metrics(logprobs.detach(), entropy.detach(), terms)
    for name, value in metrics.items():
        if not name.endswith(("_sum", "_num", "_max")):
            trial.refuse("metrics", f"returned {name!r}", "a name that ends in _sum, _num or _max")
        if not isinstance(value, Tensor) or value.ndim != 0:
            trial.refuse("metrics", f"returned {value!r:.40} as {name}", "a scalar tensor")


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
