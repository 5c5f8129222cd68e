"""Section ``objective``: the policy-gradient loss, and what it asks of model and trainer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from easyrl.config.base import NonNegativeFloat, PositiveFloat, Section, is_set
from easyrl.config.model import ModelConfig
from easyrl.config.run import RunConfig
from easyrl.config.trainer import TrainerConfig


class ObjectiveConfig(Section):
    """The policy-gradient objective (GRPO and its relatives)."""

    advantage: Literal["group_std", "group_mean"] = "group_std"  # divide by the std, or only centre
    aggregation: Literal["sequence", "token", "constant"] = "token"  # GRPO, DAPO, Dr. GRPO
    clip_eps_low: PositiveFloat = 0.2
    clip_eps_high: PositiveFloat = 0.2
    kl_coef: NonNegativeFloat = 0.0
    kl_estimator: Literal["k3", "k2"] = "k3"
    kl_in_reward_coef: NonNegativeFloat = 0.0
    entropy_coef: float = 0.0
    old_policy: Literal["auto", "lagged"] = "auto"
    importance_correction: Literal["none", "truncated", "masked"] = "none"  # of the trainer's over
    # the inference engine's probability: TIS caps the ratio, masked IS drops tokens outside
    importance_cap: Annotated[float, Field(gt=1)] = 2.0  # masked also drops below 1 / cap
    shuffle_rewards: bool = False  # control experiment: permute rewards inside each group

    @property
    def has_reference(self) -> bool:
        """Whether a frozen reference model is kept."""
        return self.kl_coef > 0 or self.kl_in_reward_coef > 0

    @field_validator("kl_estimator", mode="before")
    @classmethod
    def _no_k1(cls, value: Any) -> Any:
        if value == "k1":
            raise ValueError("k1 has a zero expected gradient as a loss; use k3 or k2")
        return value


def objective_contradictions(
    objective: ObjectiveConfig, model: ModelConfig, trainer: TrainerConfig, run: RunConfig
) -> list[str]:
    """What does not go together in the section and with others, with key and remedy."""
    problems = [
        *_own_contradictions(objective, trainer.updates_per_batch),
        *_reference_contradictions(objective, model, trainer),
    ]
    if model.logprob_backward == "same_pass" and objective.kl_in_reward_coef > 0:
        problems.append(
            "model.logprob_backward: same_pass needs an objective that is a sum over tokens, which "
            "objective.kl_in_reward_coef is not; use auto, or objective.kl_coef instead"
        )
    if not trainer.look_ahead and (reason := no_look_ahead(objective, trainer, run)) is not None:
        problems.append(f"trainer.look_ahead: {reason}; remove it")
    return problems


def no_look_ahead(objective: ObjectiveConfig, trainer: TrainerConfig, run: RunConfig) -> str | None:
    """Why ``trainer.look_ahead`` has no effect; None where it has, as far as values tell."""
    if run.mode == "sync":
        return "has no effect with run.mode=sync, where training begins with complete groups"
    if run.determinism == "strict":
        # which responses are computed ahead is a matter of the clock, and decides the last bits
        return "has no effect with run.determinism=strict, where nothing is computed ahead"
    if not (
        objective.has_reference or objective.old_policy == "lagged" or trainer.updates_per_batch > 1
    ):
        return "has no effect without a reference, a lagged old policy or several updates per batch"
    if trainer.offload_reference:  # every piece of work would move the whole reference
        return "has no effect with trainer.offload_reference"
    return None


def _own_contradictions(objective: ObjectiveConfig, updates_per_batch: int) -> list[str]:
    problems = []
    if objective.old_policy == "lagged" and updates_per_batch > 1:
        problems.append(
            "objective.old_policy: lagged is defined for trainer.updates_per_batch=1 (the weights "
            "before the previous update); use auto, the batch's own policy"
        )
    if objective.old_policy == "auto" and updates_per_batch == 1:
        problems += [
            f"objective.{key}: never acts with one update per batch (the ratio is 1); "
            "remove it, or set objective.old_policy=lagged or trainer.updates_per_batch above 1"
            for key in ("clip_eps_low", "clip_eps_high")
            if is_set(objective, key)
        ]
    if is_set(objective, "importance_cap") and objective.importance_correction == "none":
        problems.append(
            "objective.importance_cap: has no effect without a correction; remove it, or set "
            "objective.importance_correction to truncated or masked"
        )
    if is_set(objective, "kl_estimator") and objective.kl_coef == 0:
        problems.append(
            "objective.kl_estimator: has no effect without a KL term in the loss; remove it, or "
            "set objective.kl_coef above 0"
        )
    return problems


def _reference_contradictions(
    objective: ObjectiveConfig, model: ModelConfig, trainer: TrainerConfig
) -> list[str]:
    if trainer.offload_reference and not objective.has_reference:
        return [
            "trainer.offload_reference: has no effect without a reference model; remove it, or "
            "set objective.kl_coef or objective.kl_in_reward_coef above 0"
        ]
    if trainer.offload_reference and model.lora is not None:
        return [
            "trainer.offload_reference: has no effect with model.lora, whose reference is the "
            "policy without its adapter; remove it"
        ]
    return []
