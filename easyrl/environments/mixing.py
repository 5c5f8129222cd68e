"""Which of a run's environments a prompt goes to: the same for all its samples, and when a run is
resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

from easyrl.config import EnvironmentConfig
from easyrl.schema import Prompt

FIELD = "environment"  # of a record


def environment_of(
    prompt: Prompt, environments: Sequence[EnvironmentConfig], seed: int
) -> EnvironmentConfig:
    """The one that the record names in its field ``environment``, else one drawn by weight from
    ``seed``, epoch and index.

    Raises ``ValueError`` if there is none of that name.
    """
    if len(environments) == 1:
        return environments[0]
    named = prompt.metadata.get(FIELD)
    if named is not None:
        for environment in environments:
            if environment.name == named:
                return environment
        names = ", ".join(environment.name for environment in environments)
        raise ValueError(
            f"{prompt.location or prompt.index}: its field {FIELD} names {named!r}; environments "
            f"are {names}"
        )
    drawn = hashlib.sha256(f"{seed} {prompt.epoch} {prompt.index}".encode()).digest()
    share = int.from_bytes(drawn[:8], "big") / 2**64
    ends = list(accumulate(environment.weight for environment in environments))
    for environment, end in zip(environments, ends, strict=True):
        if share * ends[-1] < end:
            return environment
    return environments[-1]
