"""Section ``evaluation``: held-out prompts, and how often they are answered."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from easyrl.config.base import Section
from easyrl.config.data import DatasetConfig
from easyrl.config.rollout import SamplingConfig


class EvaluationConfig(Section):
    """Evaluation on held-out prompts: pass@k and avg@k.

    A version is evaluated where the batch that it generates leaves endpoints idle; the optimizer
    step that ends the batch waits for it. Figures come later than the metrics of their step.
    """

    data: DatasetConfig
    every_steps: NonNegativeInt = 50  # 0: only where asked for below
    at_start: bool = True  # of the model as it is before the first step
    at_end: bool = True  # of the trained model
    num_samples: PositiveInt = 1  # responses for each prompt
    pass_at: Annotated[list[PositiveInt], Field(min_length=1)] = [1]  # k of pass@k, each at most
    # num_samples
    sampling: SamplingConfig = SamplingConfig()
    threshold: float = 0.5  # a sample is correct if its first reward reaches this

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if max(self.pass_at) > self.num_samples:
            raise ValueError(
                f"pass_at: {max(self.pass_at)} needs num_samples of at least as many; raise it"
            )
        if self.sampling.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                "num_samples: sampling.temperature of 0 is greedy, all samples would be equal; "
                "use 1, or a temperature above 0"
            )
        return self
