"""Rates from a file, in place of a run's timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from pydantic import NonNegativeFloat, ValidationError, model_validator

from easyrl.config.base import Section
from easyrl.config.file import describe_problem
from easyrl.simulation.setting import Rates

REMEDY = "easyrl plan RUN_DIR --json prints those of a run, as rows[0].rates"


class StatedRates(Section):
    """The fields of ``Rates``, in seconds."""

    decode_step_s: NonNegativeFloat
    decode_each_s: NonNegativeFloat
    prefill_s: NonNegativeFloat
    request_s: NonNegativeFloat
    train_token_s: NonNegativeFloat
    train_group_s: NonNegativeFloat
    trained_share: NonNegativeFloat
    update_s: NonNegativeFloat
    border_s: NonNegativeFloat

    @model_validator(mode="after")
    def _decodes(self) -> Self:
        if not self.decode_step_s + self.decode_each_s:
            raise ValueError("decode_step_s: with decode_each_s 0, a token would take no time")
        return self


def read_rates(path: Path) -> Rates:
    """Of a JSON file. Raises ``ValueError`` naming each key and what would be right, ``OSError``
    without a file."""
    try:
        tree = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"--rates: {path} is no JSON ({error}); {REMEDY}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"--rates: {path} has no object of rates; {REMEDY}")
    try:
        return Rates(**StatedRates.model_validate(tree).model_dump())
    except ValidationError as error:
        lines = [describe_problem(problem, StatedRates) for problem in error.errors()]
        count = f"--rates: {path}: {error.error_count()} problem(s); {REMEDY}"
        raise ValueError("\n".join([count, *lines])) from None
