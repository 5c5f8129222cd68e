"""Section ``trainer``: batch, micro-batch, optimizer and ZeRO."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from easyrl.config.base import Section
from easyrl.config.model import ModelConfig
from easyrl.config.run import RunConfig


class TrainerConfig(Section):
    """Batch, micro-batch, optimizer, ZeRO."""

    batch_size: PositiveInt = 32  # prompts between two weight syncs, over all ranks
    max_draws_per_batch: PositiveInt | None = None  # prompts, those of rejected and excluded
    # groups included; default: 10 × batch_size
    updates_per_batch: PositiveInt = 1  # optimizer steps on a batch, each on its slice of prompts
    old_policy: Literal["auto", "lagged"] = "auto"  # of the ratio; auto: the policy before the
    # batch's first update; lagged: the one before the previous update
    max_steps: PositiveInt | None = None  # default: the dataset's epochs
    num_devices: PositiveInt = 1  # of easyrl up: a training process on each; without GPUs and NPUs
    # so many processes. Others who start processes are told by their own options
    packing: Literal["auto", "prompt", "tree", "none"] = "auto"  # prompt: a group shares its
    # prompt; tree: all beginnings that responses and prompts have in common; none: nothing is
    # shared; auto: prompt where the model's attention can be replaced, else none
    max_tokens_per_micro_batch: PositiveInt = 8192  # packed
    look_ahead: bool = True  # while no group is complete: reference and old log-probabilities of
    # finished responses; not in strict or sync mode, with offload_reference, or with ZeRO 2 or 3
    # over several ranks
    balance: bool = True  # a finished group goes to the data-parallel rank that has least to train
    # before it; not in strict mode, where ranks have fixed shares
    learning_rate: PositiveFloat = 1e-6  # of AdamW, at its peak
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # behind the warm-up, over
    # all steps of the run
    warmup_steps: NonNegativeInt = 0  # in which the learning rate rises from 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0  # of learning_rate, at the end of the
    # schedule
    optimizer: Literal["adamw", "adam8bit", "muon"] = "adamw"  # adam8bit: moments in 8 bits (needs
    # bitsandbytes); muon: of hidden matrices, AdamW of all else
    weight_decay: NonNegativeFloat = 0.0  # decoupled from the gradient (AdamW)
    adam_betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.999)  # of first and
    # second moment
    adam_eps: PositiveFloat = 1e-8  # added to the root of the second moment
    muon_momentum: Annotated[float, Field(gt=0, lt=1)] | None = None  # default: 0.95
    muon_learning_rate: PositiveFloat | None = None  # of muon's matrices, scaled to AdamW's size of
    # an update; default: learning_rate
    max_grad_norm: NonNegativeFloat = 1.0  # 0: no clipping
    zero_stage: Literal[0, 1, 2, 3] = 2  # what data-parallel ranks share: nothing, the optimizer's
    # state, gradients too, weights too; bytes of each: docs/memory.md
    offload_optimizer: bool = False  # masters and moments are in host memory, and stepped there
    offload_reference: bool = False  # its weights are in host memory but while it runs
    max_bad_steps: PositiveInt = 3  # steps with a non-finite loss or gradient before the run stops
    grace_s: PositiveFloat = 60.0  # from SIGTERM until the run has to have saved and ended


def trainer_contradictions(trainer: TrainerConfig, model: ModelConfig, run: RunConfig) -> list[str]:
    """What does not go together in the section and with others, with key and remedy."""
    problems = []
    if trainer.zero_stage == 0 and trainer.offload_optimizer:
        problems.append(
            "trainer.offload_optimizer: needs trainer.zero_stage of 1, 2 or 3; remove it or set one"
        )
    if model.attention == "own" and trainer.packing in ("prompt", "tree"):
        problems.append(
            f"trainer.packing: {trainer.packing} needs our attention, model.attention=own is the "
            "model's; use none, or remove one of the two"
        )
    if model.attention == "own" and model.fused_layers not in ("auto", "none"):
        problems.append(
            "model.fused_layers: are of packed rows, which model.attention=own has none of; remove "
            "one of the two"
        )
    if model.attention == "own" and trainer.offload_reference:
        problems.append(
            "trainer.offload_reference: runs layer by layer on packed rows, which "
            "model.attention=own has none of; remove one of the two"
        )
    problems += _optimizer_contradictions(trainer)
    if trainer.batch_size % trainer.updates_per_batch:
        problems.append(
            f"trainer.updates_per_batch: {trainer.updates_per_batch} slices of "
            f"trainer.batch_size={trainer.batch_size} prompts would not be equal; use a divisor"
        )
    if (trainer.max_draws_per_batch or trainer.batch_size) < trainer.batch_size:
        problems.append(
            f"trainer.max_draws_per_batch: {trainer.max_draws_per_batch} prompts cannot hold "
            f"trainer.batch_size={trainer.batch_size} accepted groups; raise it"
        )
    if trainer.old_policy == "lagged" and trainer.updates_per_batch > 1:
        problems.append(
            "trainer.old_policy: lagged is defined for trainer.updates_per_batch=1 (the weights "
            "before the previous update); use auto, the batch's own policy"
        )
    if trainer.offload_reference and model.lora is not None:
        problems.append(
            "trainer.offload_reference: has no effect with model.lora, whose reference is the "
            "policy without its adapter; remove it"
        )
    if not trainer.look_ahead and (reason := no_look_ahead(trainer, run)) is not None:
        problems.append(f"trainer.look_ahead: {reason}; remove it")
    if not trainer.balance and run.determinism == "strict":
        problems.append(
            "trainer.balance: has no effect with run.determinism=strict, where ranks have fixed "
            "shares of the prompts; remove it"
        )
    if trainer.max_steps and trainer.max_steps % trainer.updates_per_batch:
        problems.append(
            f"trainer.max_steps: {trainer.max_steps} ends inside a batch of "
            f"trainer.updates_per_batch={trainer.updates_per_batch} steps; use a multiple"
        )
    if trainer.max_steps and trainer.warmup_steps >= trainer.max_steps:
        problems.append("trainer.warmup_steps: must be below trainer.max_steps")
    if trainer.lr_schedule == "constant" and trainer.min_lr_ratio > 0:
        problems.append(
            "trainer.min_lr_ratio: has no effect with a constant lr_schedule; remove it"
        )
    if model.dtype == "bf16" and trainer.zero_stage == 0:
        problems.append(
            "trainer.zero_stage: 0 cannot accumulate bf16 gradients in fp32 (DeepSpeed refuses "
            "it); use 1, 2 or 3, or model.dtype=fp32"
        )
    return problems


def _optimizer_contradictions(trainer: TrainerConfig) -> list[str]:
    problems = []
    if trainer.optimizer != "muon":
        problems += [
            f"{key}: has no effect with trainer.optimizer={trainer.optimizer}; remove it"
            for key, value in (
                ("trainer.muon_momentum", trainer.muon_momentum),
                ("trainer.muon_learning_rate", trainer.muon_learning_rate),
            )
            if value is not None
        ]
    elif trainer.zero_stage == 3:
        problems.append(
            "trainer.optimizer: muon needs whole matrices, of which trainer.zero_stage=3 leaves "
            "each rank a shard; use 1 or 2 (0 in fp32), or trainer.optimizer=adamw"
        )
    if trainer.offload_optimizer and trainer.optimizer != "adamw":
        work = "its matrix products" if trainer.optimizer == "muon" else "its quantisation"
        problems.append(
            f"trainer.offload_optimizer: {trainer.optimizer} would do {work} on the host; remove "
            "it, or use trainer.optimizer=adamw"
        )
    return problems


def no_look_ahead(trainer: TrainerConfig, run: RunConfig) -> str | None:
    """Why ``trainer.look_ahead`` has no effect; None where it has, as far as values tell.

    It also has none where the recipe needs no model beside the policy.
    """
    if run.mode == "sync":
        return "has no effect with run.mode=sync, where training begins with complete groups"
    if run.determinism == "strict":
        # which responses are computed ahead is a matter of the clock, and decides the last bits
        return "has no effect with run.determinism=strict, where nothing is computed ahead"
    if trainer.offload_reference:  # every piece of work would move the whole reference
        return "has no effect with trainer.offload_reference"
    return None
