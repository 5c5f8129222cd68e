"""The configuration of a run on records (``source: records``): supervised fine-tuning and DPO.

It has the sections of a run on rollouts but those that say how responses are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, PositiveInt, model_validator

from easyrl.config import (
    AlarmsConfig,
    Config,
    CriticConfig,
    DataConfig,
    DatasetConfig,
    EvaluationConfig,
    FieldsConfig,
    InferenceConfig,
    JournalConfig,
    RecipeConfig,
    RewardConfig,
    RolloutConfig,
    SamplesConfig,
    SamplingConfig,
    ScoringConfig,
    ToolParserName,
    WeightSyncConfig,
)

RecordFormat = Literal["messages", "completion", "question", "preference"]

# Sections of a run on rollouts, and what of such a run they are about.
OF_ROLLOUTS = {
    "rollout": "nothing is sampled",
    "inference": "no endpoint is used",
    "rewards": "nothing is scored",
    "scoring": "nothing is scored",
    "weight_sync": "no endpoint is given weights",
    "critic": "values are of sampled responses",
    "alarms": "there are no rewards and responses to look at",
    "samples": "the model writes nothing",
    "journal": "the records themselves are what a run is resumed from",
}


class RecordFieldsConfig(FieldsConfig):
    """Names of the fields of supervised records."""

    answer: str = "answer"
    messages: str = "messages"
    completion: str = "completion"
    question: str = "question"
    chosen: str = "chosen"
    rejected: str = "rejected"


class RecordDatasetConfig(DatasetConfig):
    """Files of supervised records, and how a record becomes tokens of which some are trained."""

    no_effect: ClassVar[Mapping[str, str]] = {
        "answer_pattern": "an answer is trained as it is",
        "max_prompt_tokens": "use max_tokens, of prompt and completion",
        "on_long_prompt": "use on_long_record",
        "template_values": "a record is the same in every epoch",
    }

    fields: RecordFieldsConfig = RecordFieldsConfig()
    # auto: by the fields of the first record
    format: Literal["auto", "messages", "completion", "question", "preference"] = "auto"
    max_tokens: PositiveInt = 4096  # of a prompt with one completion
    on_long_record: Literal["skip", "fail"] = "skip"
    answer_pattern: None = Field(None, exclude=True)
    max_prompt_tokens: PositiveInt = Field(1024, exclude=True)
    on_long_prompt: Literal["skip", "fail"] = Field("skip", exclude=True)
    template_values: dict[str, list[str | int | float]] = Field({}, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_without_effect(cls, values: Any) -> Any:
        given = values if isinstance(values, Mapping) else {}
        for key, instead in cls.no_effect.items():
            if key in given:
                raise ValueError(f"{key}: has no effect with source: records ({instead}); remove")
        return values


class RecordDataConfig(RecordDatasetConfig, DataConfig):
    """The training records."""

    no_effect: ClassVar[Mapping[str, str]] = {
        **RecordDatasetConfig.no_effect,
        "max_excluded": "nobody refuses a record",
        "tool_parser": "a record brings its tool calls",
    }

    max_excluded: float = Field(0.05, exclude=True)
    tool_parser: ToolParserName = Field("auto", exclude=True)


class RecordEvaluationConfig(EvaluationConfig):
    """The loss on held-out records."""

    model_config = ConfigDict(extra="forbid")
    named = None  # one set, which has no name

    data: RecordDatasetConfig
    num_samples: PositiveInt = Field(1, exclude=True)
    pass_at: list[PositiveInt] = Field([1], exclude=True)
    sampling: SamplingConfig = Field(SamplingConfig(), exclude=True)
    threshold: float = Field(0.5, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_sampling(cls, values: Any) -> Any:
        given = values if isinstance(values, Mapping) else {}
        for key in ("num_samples", "pass_at", "sampling", "threshold"):
            if key in given:
                raise ValueError(
                    f"{key}: has no effect with source: records, where held-out records have a "
                    "loss and nothing is sampled; remove it"
                )
        return values


class RecordsConfig(Config):
    """The whole tree of a run on records."""

    source: Literal["records"] = "records"
    data: RecordDataConfig
    recipe: RecipeConfig = RecipeConfig(name="sft")
    evaluation: RecordEvaluationConfig | None = None
    rollout: RolloutConfig = Field(RolloutConfig(), exclude=True)
    inference: InferenceConfig = Field(
        default_factory=InferenceConfig.model_construct, exclude=True, validate_default=False
    )
    rewards: list[RewardConfig] = Field([], exclude=True)
    scoring: ScoringConfig = Field(ScoringConfig(), exclude=True)
    weight_sync: WeightSyncConfig = Field(WeightSyncConfig(), exclude=True)
    critic: CriticConfig = Field(CriticConfig(), exclude=True)
    journal: JournalConfig = Field(JournalConfig(), exclude=True)
    alarms: AlarmsConfig = Field(AlarmsConfig(), exclude=True)
    samples: SamplesConfig = Field(SamplesConfig(), exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_sections_of_rollouts(cls, values: Any) -> Any:
        given = values if isinstance(values, Mapping) else {}
        problems = [
            f"{section}: has no effect with source: records ({why}); remove the section"
            for section, why in OF_ROLLOUTS.items()
            if section in given
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return values

    @model_validator(mode="after")
    def _refuse_keys_of_rollouts(self) -> Self:
        run, trainer = self.run, self.trainer
        keys = (
            ("run.mode", run.mode, "async", "no response is waited for; remove it"),
            (
                "trainer.updates_per_batch",
                trainer.updates_per_batch,
                1,
                "a batch has no policy of its own; use a smaller trainer.batch_size",
            ),
            ("trainer.old_policy", trainer.old_policy, "auto", "there is none; remove it"),
            (
                "trainer.max_draws_per_batch",
                trainer.max_draws_per_batch,
                None,
                "every record is trained; remove it",
            ),
            ("trainer.look_ahead", trainer.look_ahead, True, "nothing is waited for; remove it"),
            ("trainer.balance", trainer.balance, True, "nothing is waited for; remove it"),
        )
        problems = [
            f"{key}: {value} has no effect with source: records: {remedy}"
            for key, value, default, remedy in keys
            if value != default
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self
