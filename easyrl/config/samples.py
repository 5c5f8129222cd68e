"""Section ``samples``: what is kept, and shown, of what the model writes."""

from __future__ import annotations

from typing import Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from easyrl.config.base import Section


class SamplesConfig(Section):
    """Groups of each step in ``<output_dir>/samples``, for ``easyrl samples`` (docs/samples.md)."""

    # prompts of each optimizer step, of all ranks together: the worst, the best, others by a hash;
    # 0: none
    per_step: NonNegativeInt = 4
    keep: PositiveInt = 200  # steps; those of earlier ones are removed
    console_every: NonNegativeInt = 0  # steps between two responses on the console; 0: none
    wandb_every: NonNegativeInt = 10  # steps between two tables, of a run that logs there; 0: none

    @model_validator(mode="after")
    def _has_something_to_show(self) -> Self:
        if self.console_every and not self.per_step:
            raise ValueError(
                "console_every: has nothing to show with per_step 0; set per_step, or remove it"
            )
        return self
