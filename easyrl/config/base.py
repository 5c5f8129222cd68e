"""Base of every section of the configuration: strictness, the type of paths, the error."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

FilePath = Annotated[Path, Field(strict=False), AfterValidator(Path.expanduser)]


class ConfigError(ValueError):
    """The user's configuration cannot be used; the message names each key and the remedy."""


class Section(BaseModel):
    """Unknown keys are errors, no type is guessed, values stay as loaded."""

    # what further keys hold, where those are names that the user gives
    named: ClassVar[type[Section] | None] = None
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False
    )
