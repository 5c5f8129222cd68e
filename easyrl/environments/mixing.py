"""Which of a run's environments a prompt goes to: the same for all its samples, and when a run is
resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import accumulate

from easyrl.config import ConfigError, EnvironmentConfig
from easyrl.schema import Prompt

FIELD = "environment"  # of a record


def environment_of(
    prompt: Prompt, environments: Sequence[EnvironmentConfig], seed: int
) -> EnvironmentConfig:
    """The one that the record names in its field ``environment``, else one drawn by weight from
    ``seed``, epoch and index.

    Raises ``ValueError`` if there is none of that name.
    """
    if (named := _named(prompt, environments)) is not None:
        return named
    drawn = hashlib.sha256(f"{seed} {prompt.epoch} {prompt.index}".encode()).digest()
    share = int.from_bytes(drawn[:8], "big") / 2**64
    ends = list(accumulate(environment.weight for environment in environments))
    for environment, end in zip(environments, ends, strict=True):
        if share * ends[-1] < end:
            return environment
    return environments[-1]


def check_named(environments: Sequence[EnvironmentConfig], prompts: Iterable[Prompt]) -> None:
    """Raises ``ConfigError``, with file and line, for a record that names none of them: at a run's
    start, as it may be drawn hours later. Without environments the field is a record's own."""
    if not environments:
        return
    for prompt in prompts:
        try:
            _named(prompt, environments)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _named(prompt: Prompt, environments: Sequence[EnvironmentConfig]) -> EnvironmentConfig | None:
    """The one that the record names; None: it names none."""
    named = prompt.metadata.get(FIELD)
    if named is None:
        return None
    for environment in environments:
        if environment.name == named:
            return environment
    names = ", ".join(environment.name for environment in environments)
    raise ValueError(
        f"{prompt.location or prompt.index}: its field {FIELD} names {named!r:.200}; environments "
        f"are {names}; correct the field, or remove it"
    )
