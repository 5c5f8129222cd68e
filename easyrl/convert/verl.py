"""verl's configuration as settings: what several of its keys decide together.

A file is the YAML of a run (whole or some of its keys), Hydra's list of overrides, or a script that
has them as ``key.path=value``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from easyrl.config.evaluation import NAME, EvaluationConfig, folded, set_key
from easyrl.convert.peer import Peer, Settings, Values
from easyrl.convert.values import all_tokens, off_policy_sampling
from easyrl.convert.verl_keys import (
    ACTOR,
    MEGATRON,
    MODEL,
    OLD_REWARD,
    OPTIMIZER,
    REFERENCE,
    REWARD,
    ROLLOUT,
    ROWS,
)

ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gdpo": "gdpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
}
AGGREGATION = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
}
DIVERGENCE = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "kl": "k1", "k1": "k1"}
GROUP_RELATIVE = ("grpo", "dual_clip", "gspo", "cispo")  # recipes with GRPO's keys


def num_updates(values: Values) -> int:
    """Optimizer steps on a batch; both sizes count prompts."""
    batch = values.integer("data.train_batch_size")
    mini = values.integer(f"{ACTOR}ppo_mini_batch_size")
    if batch % mini:
        raise values.wrong(
            f"{ACTOR}ppo_mini_batch_size", f"does not divide data.train_batch_size={batch}"
        )
    return batch // mini


def length(values: Values) -> Settings:
    """Updates, steps and warm-up; verl's steps are batches."""
    updates = num_updates(values)
    settings: Settings = {"trainer.updates_per_batch": updates}
    steps = values["trainer.total_training_steps"]
    if steps is None:
        settings["data.epochs"] = values.integer("trainer.total_epochs")
    else:
        settings["trainer.max_steps"] = values.integer("trainer.total_training_steps") * updates
    warmup = values[f"{OPTIMIZER}lr_warmup_steps"] or -1
    ratio = values.number(f"{OPTIMIZER}lr_warmup_steps_ratio")
    if warmup < 0 and ratio and steps is None:
        values.note(
            f"{OPTIMIZER}lr_warmup_steps_ratio",
            "is a share of the run's steps: set trainer.warmup_steps, which is a number",
        )
    elif warmup < 0:
        warmup = ceil(ratio * steps) if ratio else 0
    settings["trainer.warmup_steps"] = max(warmup, 0) * updates
    every = values["trainer.save_freq"]
    settings["checkpoint.every_steps"] = max(every, 0) * updates
    return settings


def schedule(values: Values) -> Settings:
    name = values[f"{OPTIMIZER}warmup_style"] or values[f"{OPTIMIZER}lr_scheduler_type"]
    if name not in ("constant", "cosine"):
        raise values.wrong(f"{OPTIMIZER}lr_scheduler_type", "is none of constant, cosine")
    settings: Settings = {"trainer.lr_schedule": name}
    if name == "cosine":
        settings["trainer.min_lr_ratio"] = values[f"{OPTIMIZER}min_lr_ratio"] or 0.0
    if values.is_changed(f"{ACTOR}grad_clip"):
        settings["trainer.max_grad_norm"] = values.number(f"{ACTOR}grad_clip")
    return settings


def recipe(values: Values) -> Settings:
    """The loss: which recipe, and its keys."""
    name = _name(values)
    settings: Settings = {"name": name, **_divergence(values, name)}
    if name != "rloo":
        settings |= _clip(values, name)
        settings |= {
            "aggregation": _aggregation(values),
            "entropy_coef": values.number(f"{ACTOR}entropy_coeff", least=float("-inf")),
            **_importance(values),
        }
    elif values["algorithm.adv_estimator"].startswith("rloo"):
        values.note(
            "algorithm.adv_estimator",
            "rloo has no ratio, no clip and sums over responses here; verl puts its advantages "
            "into PPO's loss",
        )
    if name in GROUP_RELATIVE:
        is_scaled = values["algorithm.norm_adv_by_std_in_grpo"]
        settings["advantage"] = "group_std" if is_scaled else "group_mean"
    if name == "ppo":
        settings |= _critic(values)
    settings |= _filter(values, name)
    made = {f"recipe.{key}": value for key, value in settings.items()}
    return made | _draws(values) | _critic_of_its_own(values, name)


def _name(values: Values) -> str:
    """The recipe of an estimator and a loss."""
    estimator = values["algorithm.adv_estimator"]
    name = ESTIMATORS.get(estimator)
    if name is None:
        values.note(
            "algorithm.adv_estimator",
            "has no counterpart, grpo is written; a recipe of your own is a file (docs/recipes.md)",
        )
        name = "grpo"
    mode = values[f"{ACTOR}policy_loss.loss_mode"]
    if mode in ("gspo", "cispo") and name == "grpo":
        return str(mode)
    if mode != "vanilla":
        values.note(
            f"{ACTOR}policy_loss.loss_mode",
            f"has no counterpart with {estimator}, the clipped surrogate is written; a recipe of "
            "your own is a file (docs/recipes.md)",
        )
    if num_updates(values) == 1:
        return name  # the ratio is 1, so that no bound acts
    if name == "grpo":
        return "dual_clip"
    if name != "rloo":
        values.note(
            f"{ACTOR}clip_ratio_c", f"the bound of dual clip is in dual_clip only, not in {name}"
        )
    return name


def _clip(values: Values, name: str) -> Settings:
    def bound(side: str) -> float:
        key = f"{ACTOR}clip_ratio_{side}"
        return values.number(f"{ACTOR}clip_ratio" if values[key] is None else key)

    settings: Settings = {"clip_eps_low": bound("low"), "clip_eps_high": bound("high")}
    symmetric, key = values[f"{ACTOR}clip_ratio"], f"{ACTOR}clip_ratio"
    if values.is_changed(key) and symmetric not in settings.values():
        values.note(key, "clip_ratio_low and clip_ratio_high decide, as they do there")
    if name == "dual_clip":
        settings["clip_ratio_c"] = values.number(f"{ACTOR}clip_ratio_c")
    return settings


def _aggregation(values: Values) -> str:
    mode, key = values[f"{ACTOR}loss_agg_mode"], f"{ACTOR}loss_agg_mode"
    if mode not in AGGREGATION:
        values.note(key, "a sum has no counterpart, constant is written, which divides it")
        return "constant"
    factor = values[f"{ACTOR}loss_scale_factor"]
    if AGGREGATION[mode] == "constant" and factor not in (
        None,
        values["data.max_response_length"],
    ):
        values.note(f"{ACTOR}loss_scale_factor", "rollout.max_tokens divides here")
    return AGGREGATION[mode]


def _divergence(values: Values, name: str) -> Settings:
    settings: Settings = {} if name == "rloo" else {"kl_coef": 0.0}
    if values[f"{ACTOR}use_kl_loss"] and name != "rloo":
        kind, key = values[f"{ACTOR}kl_loss_type"], f"{ACTOR}kl_loss_type"
        # with a + the value is the named one's, the gradient that of k2
        estimator = "k2" if kind.endswith("+") else DIVERGENCE.get(kind)
        if estimator not in ("k2", "k3"):
            values.note(key, "has no gradient of a KL as a loss, k2 is written, which has")
            estimator = "k2"
        settings |= {
            "kl_coef": values.number(f"{ACTOR}kl_loss_coef"),
            "kl_estimator": estimator,
        }
    elif values[f"{ACTOR}use_kl_loss"]:
        values.note(f"{ACTOR}use_kl_loss", "rloo has its KL in the reward: kl_in_reward_coef")
    if not values["algorithm.use_kl_in_reward"]:
        return settings | {"kl_in_reward_coef": 0.0}
    estimator = DIVERGENCE.get(values["algorithm.kl_penalty"])
    if estimator is None:
        values.note("algorithm.kl_penalty", "has no counterpart, k1 is written")
    settings["kl_in_reward_coef"] = values.number("algorithm.kl_ctrl.kl_coef")
    return settings | {"kl_in_reward_estimator": estimator or "k1"}


def _importance(values: Values) -> Settings:
    level = values["algorithm.rollout_correction.rollout_is"]
    key = "algorithm.rollout_correction.rollout_is"
    if level is None:
        return {}
    if level != "token":
        values.note(key, "weights of whole responses have no counterpart; token: truncated")
        return {}
    cap = values.number("algorithm.rollout_correction.rollout_is_threshold")
    return {"importance_correction": "truncated", "importance_cap": cap}


def _critic(values: Values) -> Settings:
    return {
        "gamma": values.number("algorithm.gamma"),
        "gae_lambda": values.number("algorithm.lam"),
        "value_clip": values.number("critic.cliprange_value"),
    }


def _critic_of_its_own(values: Values, name: str) -> Settings:
    if name != "ppo":
        return {}
    settings: Settings = {
        "critic.learning_rate": values.number("critic.optim.lr"),
        "critic.weight_decay": values.number("critic.optim.weight_decay"),
    }
    if values["critic.model.path"] is not None:
        settings["critic.path"] = values["critic.model.path"]
    return settings


def _filter(values: Values, name: str) -> Settings:
    """DAPO's dynamic sampling."""
    if not values["algorithm.filter_groups.enable"]:
        return {}
    if name == "rloo":
        values.note("algorithm.filter_groups.enable", "rloo takes every group")
        return {}
    if values["algorithm.filter_groups.metric"] not in ("reward", "seq_reward", "seq_final_reward"):
        values.note("algorithm.filter_groups.metric", "the sum of the rewards is looked at")
    return {"dynamic_sampling": True}


def _draws(values: Values) -> Settings:
    most = values["algorithm.filter_groups.max_num_gen_batches"]
    if not values["algorithm.filter_groups.enable"] or most <= 0:
        return {}
    drawn = values["data.gen_batch_size"] or values.integer("data.train_batch_size")
    return {"trainer.max_draws_per_batch": most * drawn}


def data(values: Values) -> Settings:
    settings: Settings = {"data.fields.answer": "reward_model.ground_truth"}
    if (files := _files(values["data.train_files"])) is not None:
        settings["data.files"] = files
    if values["data.filter_overlong_prompts"]:
        settings["data.on_long_prompt"] = "skip"
    elif values["data.truncation"] == "error":
        settings["data.on_long_prompt"] = "fail"
    else:
        values.note("data.truncation", "a prompt is never cut: longer ones are skipped")
        settings["data.on_long_prompt"] = "skip"
    if values["data.train_max_samples"] > 0:
        settings["data.max_records"] = values["data.train_max_samples"]
    if values["data.apply_chat_template_kwargs"]:
        settings["data.chat_template_kwargs"] = values["data.apply_chat_template_kwargs"]
    sampled = {
        "rollout.top_p": values.number(f"{ROLLOUT}top_p"),
        "rollout.top_k": all_tokens(values[f"{ROLLOUT}top_k"]),
    }
    return settings | off_policy_sampling(sampled, values, f"{ROLLOUT}top_p")


def evaluation(values: Values) -> Settings:
    files, every = _files(values["data.val_files"]), values["trainer.test_freq"]
    if files is None or every <= 0:
        return {}
    samples = values.integer(f"{ROLLOUT}val_kwargs.n")
    is_sampled = values[f"{ROLLOUT}val_kwargs.do_sample"]
    sampling = {
        "max_tokens": values.integer("data.max_response_length"),
        "temperature": values.number(f"{ROLLOUT}val_kwargs.temperature") if is_sampled else 0.0,
        "top_p": values.number(f"{ROLLOUT}val_kwargs.top_p"),
        "top_k": all_tokens(values[f"{ROLLOUT}val_kwargs.top_k"]),
    }
    settings: Settings = {
        "evaluation.every_steps": every * num_updates(values),
        "evaluation.at_start": values["trainer.val_before_train"],
        "evaluation.num_samples": samples if is_sampled else 1,
        **{f"evaluation.sampling.{key}": value for key, value in sampling.items()},
    }
    for name, of_set in _held_out_sets(files).items():
        key = f"{set_key(name)}.data"
        settings |= {
            f"{key}.files": of_set,
            f"{key}.fields.prompt": values["data.prompt_key"],
            f"{key}.fields.answer": "reward_model.ground_truth",
            f"{key}.max_prompt_tokens": values.integer("data.max_prompt_length"),
        }
    return settings


def _held_out_sets(files: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Several files are sets, as verl tells of each data source by itself: named as the files, or
    as their folders (``gsm8k/test.parquet``); one set of all where neither can name them."""
    paths = [Path(file) for file in files]
    for names in ([path.stem for path in paths], [path.parent.name for path in paths]):
        names = [name.replace(".", "_") for name in names]
        distinct = {folded(name) for name in names if NAME.fullmatch(name)}
        if len(distinct - {*EvaluationConfig.model_fields}) == len(files) > 1:
            return {name: [file] for name, file in zip(names, files, strict=True)}
    return {"": files}


def rewards(values: Values) -> Settings:
    for section in (REWARD, OLD_REWARD):
        path = values[f"{section}path"]
        if path is None:
            continue
        name = values[f"{section}name"] or "compute_score"
        if not Path(path).expanduser().is_file():
            values.note(f"{section}path", "is no file here: name it with --reward FILE:FUNCTION")
            return {}
        return {"rewards": [{"file": path, "function": name, "signature": "verl"}]}
    return {}


def machine(values: Values) -> Settings:
    """Adapters, parallelism and memory."""
    settings: Settings = {}
    if not values[f"{MODEL}enable_gradient_checkpointing"]:
        settings["model.activation_checkpointing"] = "none"
    if values[f"{MODEL}lora_rank"] > 0:
        settings["model.lora.rank"] = values[f"{MODEL}lora_rank"]
        settings["model.lora.alpha"] = values.number(f"{MODEL}lora_alpha")
        modules = values[f"{MODEL}target_modules"]
        if modules != "all-linear":
            settings["model.lora.target_modules"] = (
                [modules] if isinstance(modules, str) else modules
            )
    if values[f"{ACTOR}use_dynamic_bsz"]:
        most = values.integer(f"{ACTOR}ppo_max_token_len_per_gpu")
        settings["trainer.max_tokens_per_micro_batch"] = most
    if values[f"{ACTOR}strategy"] == "megatron":
        return settings | _parallel(values)
    if values[f"{ACTOR}fsdp_config.optimizer_offload"]:
        settings["trainer.offload_optimizer"] = True
    has_reference = values[f"{ACTOR}use_kl_loss"] or values["algorithm.use_kl_in_reward"]
    if values[f"{REFERENCE}fsdp_config.param_offload"] and has_reference:
        settings["trainer.offload_reference"] = True
    return settings


def _parallel(values: Values) -> Settings:
    tensor = values.integer(f"{MEGATRON}tensor_model_parallel_size")
    pipeline = values.integer(f"{MEGATRON}pipeline_model_parallel_size")
    if tensor * pipeline == 1:
        return {}
    chunks = values[f"{MEGATRON}virtual_pipeline_model_parallel_size"]
    settings: Settings = {
        "parallel.tensor": tensor,
        "parallel.pipeline": pipeline,
        "trainer.zero_stage": 1,
        "parallel.sequence": bool(tensor > 1 and values[f"{MEGATRON}sequence_parallel"]),
    }
    if chunks is not None and pipeline > 1:
        settings["parallel.chunks_per_stage"] = chunks
    return settings


def _files(value: Any) -> list[str] | None:
    return [value] if isinstance(value, str) else value


VERL = Peer(
    "verl",
    "verl",
    ROWS,
    (length, schedule, recipe, data, evaluation, rewards, machine),
    own_keys=("actor_rollout_ref", "algorithm"),
)
