"""Base of every section of the configuration: strictness, types of numbers and paths, the error."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
FilePath = Annotated[Path, Field(strict=False), AfterValidator(Path.expanduser)]


class ConfigError(ValueError):
    """The user's configuration cannot be used; the message names each key and the remedy."""


class Section(BaseModel):
    """Unknown keys are errors, no type is guessed, values stay as loaded."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False
    )
