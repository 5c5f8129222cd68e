"""TRL's ``GRPOConfig`` as settings: what several of its keys decide together.

A file is what ``to_json_string`` writes, or YAML with some of the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from easyrl.convert.peer import Peer, Settings, Values
from easyrl.convert.trl_keys import BATCH, ROWS
from easyrl.convert.values import all_tokens, kept, off_policy_sampling, whole_multiple

AGGREGATION = {
    "grpo": "sequence",
    "dapo": "token",
    "bnpo": "token",
    "cispo": "token",
    "dr_grpo": "constant",
}
LOSSES = (*AGGREGATION, "sapo", "luspo", "vespo")
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "adam8bit"),
}
SAMPLING = {
    name: f"rollout.{name}"
    for name in (
        *("stop", "stop_token_ids", "min_tokens", "ignore_eos"),
        *("presence_penalty", "frequency_penalty"),
    )
}


# ---- settings that several keys decide ----


def batch(values: Values) -> Settings:
    """Prompts between two syncs, and optimizer steps on them.

    TRL counts responses: an optimizer step has B · W · A of them (per device, processes,
    accumulation), and B · W · S are generated together (``steps_per_generation``).
    """
    responses, accumulated = values.integer(BATCH), values.integer("gradient_accumulation_steps")
    group = values.integer("num_generations", least=2)
    together, steps = _generation(values, responses, accumulated)
    in_step = together // steps * accumulated
    if steps % accumulated and accumulated % steps:
        raise values.wrong(
            "steps_per_generation" if "steps_per_generation" in values.given else BATCH,
            f"has generations of {steps} micro-batches and optimizer steps of {accumulated} "
            "(gradient_accumulation_steps), of which neither is a multiple of the other",
        )
    num_updates = max(steps // accumulated, 1)
    in_batch = max(together, in_step)
    if in_batch % (group * num_updates):
        raise values.wrong(
            "num_generations",
            f"does not divide the {in_batch // num_updates} responses of an optimizer step "
            f"({in_batch} by {num_updates} steps), which has whole groups here",
        )
    return {
        "trainer.batch_size": in_batch // group,
        "trainer.updates_per_batch": num_updates,
    }


def _generation(values: Values, responses: int, accumulated: int) -> tuple[int, int]:
    """Responses that are generated together, and micro-steps that they are cut into."""
    whole, steps = values["generation_batch_size"], values["steps_per_generation"]
    for key, given in (("generation_batch_size", whole), ("steps_per_generation", steps)):
        if given is not None:
            values.integer(key)
    if whole is not None and steps is not None:  # as TRL writes them down once it has counted
        if whole % (responses * steps):
            raise values.wrong("generation_batch_size", f"is no multiple of {responses} · {steps}")
        return whole, steps
    world = values.world_size
    if world is None:
        world = 1
        values.note(BATCH, "is counted for one process; --world-size says how many there were")
    if whole is None:
        steps = steps or accumulated
        return responses * world * steps, steps
    if whole % (responses * world):
        raise values.wrong(
            "generation_batch_size", f"is no multiple of {responses} responses on {world} processes"
        )
    return whole, whole // (responses * world)


def length(values: Values) -> Settings:
    """Steps, epochs and warm-up."""
    settings: Settings = {}
    num_updates = batch(_quiet(values))["trainer.updates_per_batch"]
    steps = values["max_steps"]
    if steps > 0:
        settings["trainer.max_steps"] = whole_multiple(steps, num_updates)
        if steps % num_updates:
            values.note("max_steps", f"a batch has {num_updates} steps: the next multiple is set")
    else:
        epochs = values.number("num_train_epochs")
        settings["data.epochs"] = max(1, ceil(epochs))
        if not epochs.is_integer():
            values.note("num_train_epochs", "epochs are whole: rounded up; or trainer.max_steps")
    warmup = values.number("warmup_steps")
    ratio = values.number("warmup_ratio") or (warmup if 0 < warmup < 1 else 0.0)
    if ratio and steps > 0:
        warmup = ceil(ratio * steps)
    elif ratio:
        warmup = 0
        key = "warmup_ratio" if values["warmup_ratio"] else "warmup_steps"
        values.note(
            key, "is a share of the run's steps: set trainer.warmup_steps, which is a number"
        )
    settings["trainer.warmup_steps"] = int(warmup)
    if values.integer("num_iterations") > 1:
        values.note(
            "num_iterations",
            "a response is trained once; trainer.updates_per_batch cuts a batch into slices "
            "instead, an optimizer step each",
        )
    return settings


def recipe(values: Values) -> Settings:
    """The loss: which recipe, and its keys."""
    loss = values.one_of("loss_type", LOSSES)
    if loss not in AGGREGATION:
        values.note(
            "loss_type",
            "has no counterpart, grpo with a mean over tokens is written; a recipe of your own is "
            "a file (docs/recipes.md)",
        )
    if loss == "bnpo":
        values.note("loss_type", "its mean over a micro-batch's tokens is one over the step's here")
    low = values.number("epsilon")
    high = low if values["epsilon_high"] is None else values.number("epsilon_high")
    settings: Settings = {
        "name": "grpo",
        "aggregation": AGGREGATION.get(loss, "token"),
        "clip_eps_low": low,
        "clip_eps_high": high,
        **_divergence(values),
        **_entropy(values),
        "mask_truncated": values["mask_truncated_completions"],
        **_importance(values),
    }
    settings |= _kind(values, loss, settings) | _scale(values)
    if settings["name"] == "gdpo":
        settings.pop("advantage", None)
    return {f"recipe.{key}": value for key, value in settings.items()}


def _kind(values: Values, loss: str, settings: Settings) -> Settings:
    """The recipe's name, and what of its keys is not grpo's."""
    is_sequence = values.one_of("importance_sampling_level", ("token", "sequence")) == "sequence"
    if loss == "cispo":
        if settings["clip_eps_high"] <= 1:
            raise values.wrong(
                "epsilon_high",
                "bounds the ratio itself with loss_type=cispo, and is not above 1 (TRL recommends "
                "5.0)",
            )
        if is_sequence:
            values.note("importance_sampling_level", "cispo has the ratio of tokens here")
        return {
            "name": "cispo",
            "clip_eps_low": 1.0,
            "clip_eps_high": settings["clip_eps_high"] - 1,
        }
    if values["multi_objective_aggregation"] == "normalize_then_sum":
        if is_sequence:
            values.note("importance_sampling_level", "gdpo has the ratio of tokens here")
        return {"name": "gdpo"}
    if is_sequence:
        if values["delta"] is not None:
            values.note("delta", "has no counterpart with ratios of whole responses")
        return {"name": "gspo"}
    if values["delta"] is not None:
        return {"name": "two_sided", "delta": values.number("delta"), "dynamic_sampling": False}
    return {}


def _scale(values: Values) -> Settings:
    """What advantages are divided by."""
    given = values.as_given("scale_rewards")
    scale = {True: "group", False: "none"}.get(given, given)  # its older form
    if scale not in ("group", "none", "batch"):
        raise values.wrong("scale_rewards", "is none of group, batch, none")
    if scale == "batch":
        values.note(
            "scale_rewards",
            "the batch's deviation has no counterpart, the group's is written; "
            "reinforce_pp_baseline divides by that of the centred rewards",
        )
    return {"advantage": "group_mean" if scale == "none" else "group_std"}


def _divergence(values: Values) -> Settings:
    """The KL to the reference. Times a ratio of 1 that carries gradient, k3 has that of k2."""
    beta = values.number("beta")
    if beta == 0:
        return {"kl_coef": 0.0}
    if not values["use_bias_correction_kl"]:
        return {"kl_coef": beta, "kl_estimator": "k3"}
    values.note(
        "beta",
        "k3 times the ratio (use_bias_correction_kl) has the gradient of k2 where the ratio is 1, "
        "as in a batch's first update: recipe.kl_estimator is k2",
    )
    return {"kl_coef": beta, "kl_estimator": "k2"}


def _entropy(values: Values) -> Settings:
    coefficient = values.number("entropy_coef", least=float("-inf"))
    settings: Settings = {"entropy_coef": coefficient}
    if values["use_adaptive_entropy"]:
        settings |= {
            "entropy_target": values.number("entropy_target"),
            "entropy_coef_step": values.number("entropy_coef_delta"),
            "entropy_coef_max": values.number("entropy_coef_max"),
        }
        if values["entropy_coef_min"] != 0:
            values.note("entropy_coef_min", "the coefficient's control goes down to 0 here")
    if (coefficient or values["use_adaptive_entropy"]) and values["loss_type"] not in (
        *("dapo", "bnpo", "cispo"),
    ):
        values.note(
            "entropy_coef",
            "TRL's bonus is a mean over tokens with any loss_type, here it is averaged as "
            "recipe.aggregation says",
        )
    return settings


def _importance(values: Values) -> Settings:
    """The correction for what vLLM computes otherwise; TRL has it with vLLM only."""
    if not values["use_vllm"] or not values["vllm_importance_sampling_correction"]:
        return {}
    mode = values["vllm_importance_sampling_mode"]
    lowest, most = (
        values["vllm_importance_sampling_clip_min"],
        values["vllm_importance_sampling_clip_max"],
    )
    if values["vllm_importance_sampling_cap"] is not None:  # its older name
        most = values["vllm_importance_sampling_cap"]
    if mode == "token_truncate" and lowest is None and most is not None and most > 1:
        return {"importance_correction": "truncated", "importance_cap": float(most)}
    is_inverse = lowest is not None and most is not None and abs(lowest * most - 1) < 1e-6
    if mode == "token_mask" and is_inverse and most > 1:
        return {"importance_correction": "masked", "importance_cap": float(most)}
    values.note(
        "vllm_importance_sampling_mode",
        "no correction is written: endpoints prove that they serve the trainer's weights; "
        "recipe.importance_correction can cut (truncated) or drop (masked, outside 1/cap to cap) "
        "single tokens",
    )
    return {}


def sampling(values: Values) -> Settings:
    settings: Settings = {
        "rollout.top_p": values.number("top_p"),
        "rollout.top_k": all_tokens(values["top_k"]),
        "rollout.min_p": values["min_p"] or 0.0,
        "rollout.repetition_penalty": values.number("repetition_penalty"),
    }
    further = values["generation_kwargs"] or {}
    if not isinstance(further, Mapping):
        raise values.wrong("generation_kwargs", "is no mapping")
    own, others = kept(SAMPLING, further)
    if others:
        values.note("generation_kwargs", f"{', '.join(others)}: no counterpart")
    settings |= own
    return settings | off_policy_sampling(settings, values, "top_p")


def columns(values: Values) -> Settings:
    """No column is the answer: functions are given all of them by name."""
    return {"data.fields.answer": None}


def machine(values: Values) -> Settings:
    """Precision, memory and endpoints."""
    settings: Settings = {"model.dtype": "bf16"}
    if values["fp16"]:
        values.note("fp16", "has no counterpart, bf16 is written")
    elif values["bf16"] is False:
        settings["model.dtype"] = "fp32"
    if values["gradient_checkpointing"] is False:
        settings["model.activation_checkpointing"] = "none"
    settings |= _zero(values)
    if values["use_vllm"] and values["vllm_mode"] == "server":
        url = values["vllm_server_base_url"]
        host = {"0.0.0.0": "127.0.0.1"}.get(values["vllm_server_host"], values["vllm_server_host"])
        settings["inference.endpoints"] = [url or f"http://{host}:{values['vllm_server_port']}"]
    elif values["use_vllm"]:
        values.note(
            "vllm_mode",
            "servers have devices of their own: inference.launch starts vLLM beside the run, with "
            f"tensor_parallel {values['vllm_tensor_parallel_size']}",
        )
    return settings


def _zero(values: Values) -> Settings:
    given = values["deepspeed"]
    if given is None:
        return {}
    zero = given.get("zero_optimization", {}) if isinstance(given, Mapping) else None
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if stage not in (0, 1, 2, 3):
        values.note("deepspeed", "of it trainer.zero_stage and trainer.offload_optimizer are yours")
        return {}
    assert isinstance(zero, Mapping)
    device = (zero.get("offload_optimizer") or {}).get("device", "none")
    settings: Settings = {"trainer.zero_stage": stage}
    if device not in ("none", None) and stage > 0:
        settings["trainer.offload_optimizer"] = True
    return settings


def schedule(values: Values) -> Settings:
    """The learning rate's schedule, the optimizer, and when a checkpoint is due."""
    settings: Settings = {}
    name = str(values["lr_scheduler_type"])
    if name not in SCHEDULES:
        values.note("lr_scheduler_type", "has no counterpart: constant, linear or cosine")
    settings["trainer.lr_schedule"] = SCHEDULES.get(name, "constant")
    further = values["lr_scheduler_kwargs"] or {}
    if isinstance(further, Mapping) and name == "cosine_with_min_lr":
        ratio = further.get("min_lr_rate")
        if ratio is None and further.get("min_lr") is not None:
            ratio = further["min_lr"] / values.number("learning_rate")
        settings["trainer.min_lr_ratio"] = float(ratio or 0.0)
    elif further:
        values.note("lr_scheduler_kwargs", "only the least of cosine_with_min_lr has a counterpart")
    optimizer = str(values["optim"])
    if optimizer not in OPTIMIZERS:
        values.note(
            "optim", "has no counterpart, adamw is written; muon and adam8bit are there too"
        )
    settings["trainer.optimizer"] = OPTIMIZERS.get(optimizer, "adamw")
    betas = (values.number("adam_beta1"), values.number("adam_beta2"))
    settings["trainer.adam_betas"] = list(betas)
    strategy, every = values["save_strategy"], values["save_steps"]
    if strategy == "steps" and every >= 1:
        settings["checkpoint.every_steps"] = int(every)
    elif strategy != "no":
        values.note("save_strategy", "checkpoint.every_steps is a number of optimizer steps")
    return settings


def adapters(values: Values) -> Settings:
    """What TRL's command line has of a model."""
    if not values["use_peft"]:
        return {}
    settings: Settings = {
        "model.lora.rank": values.integer("lora_r"),
        "model.lora.alpha": values.number("lora_alpha"),
    }
    modules = values["lora_target_modules"]
    if modules not in (None, "all-linear", ["all-linear"]):
        settings["model.lora.target_modules"] = [modules] if isinstance(modules, str) else modules
    if values["lora_dropout"]:
        values.note("lora_dropout", "adapters have no dropout: the policy that samples has none")
    return settings


def _quiet(values: Values) -> Values:
    """The same, whose notes are told elsewhere."""
    return replace(values, notes=[])


TRL = Peer(
    "trl",
    "TRL's GRPOConfig",
    ROWS,
    (batch, length, recipe, sampling, columns, machine, schedule, adapters),
    own_keys=(BATCH, "num_generations", "max_completion_length", "beta", "loss_type"),
)
