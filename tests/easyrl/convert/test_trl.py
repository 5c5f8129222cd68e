"""TRL's ``GRPOConfig`` as ours: the same prompts, lengths, loss and schedule, or a word on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from easyrl.config import Config, ConfigError
from easyrl.config.file import load_config
from easyrl.convert.convert import Converted, convert_file
from easyrl.recipes import Recipe
from easyrl.recipes.estimators import kl_estimate
from easyrl.recipes.loading import load_recipe

# In the shape of ``GRPOConfig.to_json_string``, of which it has what a run of eight processes set.
SAID = {
    "output_dir": "runs/mine",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "generation_batch_size": 64,
    "steps_per_generation": 2,
    "num_generations": 8,
    "num_iterations": 1,
    "num_train_epochs": 2.0,
    "max_steps": -1,
    "learning_rate": 3e-6,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 10,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 0.2,
    "bf16": True,
    "seed": 7,
    "beta": 0.04,
    "use_bias_correction_kl": False,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "loss_type": "grpo",
    "scale_rewards": "group",
    "max_completion_length": 1024,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "mask_truncated_completions": True,
    "save_strategy": "steps",
    "save_steps": 25,
    "save_total_limit": 3,
    "report_to": ["tensorboard"],
    "hub_token": "<HUB_TOKEN>",
    "logging_steps": 1,
    "dataloader_num_workers": 4,
}
FURTHER = {"model.path": "models/m", "data.files": ["p.jsonl"], "rewards": [{"name": "math"}]}


def converted(tmp_path: Path, said: dict[str, Any], **options: Any) -> Converted:
    file = tmp_path / "grpo_config.json"
    file.write_text(json.dumps(said))
    return convert_file(file, peer="trl", further=FURTHER, **options)


def loaded(tmp_path: Path, said: dict[str, Any], **options: Any) -> tuple[Config, Recipe, str]:
    """The written file as a run reads it, its recipe, and what was said."""
    made = converted(tmp_path, said, **options)
    file = tmp_path / "easyrl.yaml"
    file.write_text(made.text("grpo_config.json"))
    config = load_config(file)
    return config, load_recipe(config), "\n".join(map(str, made.notes))


def test_a_run_means_the_same(tmp_path: Path) -> None:
    config, recipe, said = loaded(tmp_path, SAID)
    trainer, rollout = config.trainer, config.rollout
    assert (trainer.batch_size, trainer.updates_per_batch) == (8, 1)  # 64 responses of 8 a prompt
    assert (rollout.num_generations, rollout.max_tokens, rollout.temperature) == (8, 1024, 0.9)
    assert (trainer.learning_rate, trainer.lr_schedule, trainer.warmup_steps) == (
        3e-6,
        "cosine",
        10,
    )
    assert (trainer.weight_decay, trainer.adam_betas) == (0.1, (0.9, 0.95))
    assert (trainer.max_grad_norm, trainer.max_steps, config.data.epochs) == (0.2, None, 2)
    assert recipe.kl_coef == 0.04 and recipe.kl_estimator == "k3"  # type: ignore[attr-defined]
    assert (recipe.clip_eps_low, recipe.clip_eps_high) == (0.2, 0.28)  # type: ignore[attr-defined]
    assert recipe.aggregation == "sequence" and recipe.advantage == "group_std"  # type: ignore[attr-defined]
    assert recipe.mask_truncated  # type: ignore[attr-defined]
    assert (config.checkpoint.every_steps, config.checkpoint.keep) == (25, 3)
    assert (config.run.seed, config.run.trackers, config.model.dtype) == (
        7,
        ["tensorboard"],
        "bf16",
    )
    assert not rollout.allow_off_policy_sampling and config.data.fields.answer is None
    assert said == "inference.endpoints: is not in the file; http://127.0.0.1:8000 is written"


@pytest.mark.parametrize(
    ("per_device", "world", "accumulated", "steps", "group", "prompts", "updates"),
    [
        (8, 1, 1, None, 8, 1, 1),
        (8, 1, 4, None, 8, 4, 1),
        (2, 4, 4, 4, 8, 4, 1),
        (4, 8, 2, 8, 16, 16, 4),  # 256 responses, in 4 steps of 64
        (4, 2, 4, 2, 8, 4, 1),  # two generations by the same weights are one batch
    ],
)
def test_prompts_of_a_batch_and_steps_on_it(
    tmp_path: Path,
    per_device: int,
    world: int,
    accumulated: int,
    steps: int | None,
    group: int,
    prompts: int,
    updates: int,
) -> None:
    said = {
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulated,
        "num_generations": group,
    } | ({} if steps is None else {"steps_per_generation": steps})
    config, _, notes = loaded(tmp_path, said, world_size=world)
    assert (config.trainer.batch_size, config.trainer.updates_per_batch) == (prompts, updates)
    assert "--world-size" not in notes
    whole = said | {"generation_batch_size": per_device * world * (steps or accumulated)}
    whole["steps_per_generation"] = steps or accumulated  # both, as TRL writes them: tells W
    again, _, _ = loaded(tmp_path, whole)
    assert again.trainer == config.trainer


def test_without_a_word_on_processes_one_is_taken_and_said(tmp_path: Path) -> None:
    config, _, said = loaded(tmp_path, {"per_device_train_batch_size": 16})
    assert config.trainer.batch_size == 2 and said.count("--world-size") == 1


DEFAULTS = {"per_device_train_batch_size": 8, "num_generations": 8}


def test_trl_defaults_that_are_not_ours_are_written(tmp_path: Path) -> None:
    config, recipe, said = loaded(tmp_path, DEFAULTS, world_size=1)
    assert config.trainer.lr_schedule == "linear" and config.data.epochs == 3
    assert config.recipe.name == "grpo" and recipe.aggregation == "token"  # type: ignore[attr-defined]
    assert recipe.kl_coef == 0.0 and config.checkpoint.every_steps == 500  # type: ignore[attr-defined]
    assert config.rollout.max_tokens == 512 and config.run.seed == 42
    assert said.count("\n") == 0  # nothing is told of a default


@pytest.mark.parametrize(
    ("said", "name", "expected"),
    [
        ({"loss_type": "grpo"}, "grpo", {"aggregation": "sequence"}),
        (
            {"loss_type": "dr_grpo", "scale_rewards": False},
            "grpo",
            {"aggregation": "constant", "advantage": "group_mean"},
        ),
        ({"loss_type": "bnpo"}, "grpo", {"aggregation": "token"}),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            "cispo",
            {"clip_eps_low": 1.0, "clip_eps_high": 4.0, "aggregation": "token"},
        ),
        (
            {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4},
            "gspo",
            {"aggregation": "sequence", "clip_eps_low": 3e-4, "clip_eps_high": 3e-4},
        ),
        (
            {"delta": 4.0},
            "two_sided",
            {"delta": 4.0, "dynamic_sampling": False, "entropy_coef": 0.0, "kl_coef": 0.0},
        ),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "gdpo", {"aggregation": "token"}),
        (
            {"use_adaptive_entropy": True, "entropy_target": 0.3, "entropy_coef": 0.01},
            "grpo",
            {"entropy_target": 0.3, "entropy_coef": 0.01, "entropy_coef_step": 0.005},
        ),
        ({"beta": 0.1}, "grpo", {"kl_coef": 0.1, "kl_estimator": "k2"}),
        (
            {
                "use_vllm": True,
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_max": 2.5,
            },
            "grpo",
            {"importance_correction": "truncated", "importance_cap": 2.5},
        ),
    ],
)
def test_losses(tmp_path: Path, said: dict[str, Any], name: str, expected: dict[str, Any]) -> None:
    config, recipe, _ = loaded(tmp_path, DEFAULTS | said)
    assert config.recipe.name == name
    assert {key: getattr(recipe, key) for key in expected} == expected


def test_a_kl_times_the_ratio_has_the_gradient_of_k2_on_policy() -> None:
    """What ``use_bias_correction_kl`` is converted by, in TRL's own form."""
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(50, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(50, generator=generator, dtype=torch.float64)
    kl = torch.exp(reference - policy) - (reference - policy) - 1
    (theirs,) = torch.autograd.grad((torch.exp(policy - policy.detach()) * kl).sum(), policy)
    (ours,) = torch.autograd.grad(kl_estimate(policy, reference, "k2").sum(), policy)
    (other,) = torch.autograd.grad(kl_estimate(policy, reference, "k3").sum(), policy)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(other, theirs, rtol=1e-2)


def test_a_cispo_weight_has_trls_bound() -> None:
    """``clamp(ratio, max=epsilon_high)`` there, ``1 + clip_eps_high`` here."""
    ratio = torch.tensor([0.01, 0.9, 4.9, 5.1, 40.0])
    ours = ratio.clamp(1 - 1.0, 1 + (5.0 - 1))
    assert torch.equal(ours, torch.clamp(ratio, max=5.0))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"num_iterations": 2}, "num_iterations=2: a response is trained once"),
        ({"loss_type": "sapo"}, "loss_type=sapo: has no counterpart"),
        ({"scale_rewards": "batch"}, "scale_rewards=batch: the batch's deviation"),
        ({"sync_ref_model": True}, "sync_ref_model=True: the reference is model.path"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2: a loss of its own"),
        ({"warmup_ratio": 0.1}, "warmup_ratio=0.1: is a share of the run's steps"),
        ({"use_vllm": True}, "vllm_mode=colocate: servers have devices of their own"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type=polynomial: has no counterpart"),
        ({"optim": "adafactor"}, "optim=adafactor: has no counterpart"),
        ({"eval_strategy": "steps"}, "eval_strategy=steps: `evaluation`"),
        ({"generation_kwargs": {"num_beams": 4}}, "num_beams: no counterpart"),
        ({"never_heard_of": 1}, "never_heard_of: not looked at"),
    ],
)
def test_what_has_no_counterpart_is_said(tmp_path: Path, said: dict[str, Any], told: str) -> None:
    _, _, notes = loaded(tmp_path, DEFAULTS | said, world_size=1)
    assert told in notes


def test_sampling_that_is_cut_is_allowed_and_said(tmp_path: Path) -> None:
    said = DEFAULTS | {"top_p": 0.95, "top_k": 50, "generation_kwargs": {"stop": ["</a>"]}}
    config, _, notes = loaded(tmp_path, said)
    assert config.rollout.allow_off_policy_sampling and "top_p, top_k" in notes
    assert (config.rollout.top_p, config.rollout.top_k, config.rollout.stop) == (0.95, 50, ["</a>"])


def test_steps_and_warm_up(tmp_path: Path) -> None:
    said = DEFAULTS | {"num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 101}
    said |= {"steps_per_generation": 2, "warmup_steps": 0.1, "num_train_epochs": 5}
    config, _, notes = loaded(tmp_path, said, world_size=1)
    assert (config.trainer.updates_per_batch, config.trainer.max_steps) == (2, 102)
    assert config.trainer.warmup_steps == 11 and config.data.epochs == 1  # 0.1 · 101, rounded up
    assert "max_steps=101: a batch has 2 steps" in notes


def test_zero_endpoints_and_adapters(tmp_path: Path) -> None:
    said = DEFAULTS | {
        "deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_port": 8123,
        "use_peft": True,
        "lora_r": 32,
        "lora_alpha": 64,
        "lora_target_modules": ["q_proj", "v_proj"],
        "gradient_checkpointing": False,
        "bf16": False,
        "run_name": "my run/2",
    }
    config, _, _ = loaded(tmp_path, said)
    assert (config.trainer.zero_stage, config.trainer.offload_optimizer) == (3, True)
    assert config.inference.urls == ["http://127.0.0.1:8123"]
    assert config.model.lora is not None and config.model.lora.rank == 32
    assert config.model.lora.alpha == 64.0
    assert config.model.lora.target_modules == ["q_proj", "v_proj"]
    assert config.model.activation_checkpointing == "none" and config.model.dtype == "fp32"
    assert config.run.name == "my-run-2"


def test_model_and_dataset_of_trls_command_line(tmp_path: Path) -> None:
    said = DEFAULTS | {"model_name_or_path": "models/own", "dataset_name": "someone/maths"}
    said |= {"dataset_config": "main", "dataset_train_split": "train[:50]"}
    file = tmp_path / "grpo.json"
    file.write_text(json.dumps(said))
    made = convert_file(file)
    assert made.settings["data.dataset"] == "someone/maths" and "data.files" not in made.settings
    assert (made.settings["data.subset"], made.settings["data.split"]) == ("main", "train[:50]")
    assert made.settings["model.path"] == "models/own"
    assert {note.theirs for note in made.notes} >= {"rewards", "inference.endpoints"}
    assert not {note.theirs for note in made.notes} & {"data.files", "model.path"}
    instead = convert_file(file, further={"data.files": ["p.jsonl"]})
    assert "data.dataset" not in instead.settings and "data.split" not in instead.settings


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"learning_rate": "fast"}, "learning_rate: 'fast' is no number"),
        ({"num_generations": 0}, "num_generations: 0 is no whole number of at least 2"),
        ({"num_generations": 3}, "num_generations: 3 does not divide the 8 responses"),
        ({"shuffle_dataset": "yes"}, "shuffle_dataset: 'yes' is not true or false"),
        ({"loss_type": "gpro"}, "loss_type: 'gpro' is none of grpo, dapo"),
        ({"generation_batch_size": 12}, "generation_batch_size: 12 is no multiple of 8"),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "steps_per_generation: 3 has generations of 3 micro-batches",
        ),
        (
            {"num_generations": 16, "steps_per_generation": 2},
            "num_generations: 16 does not divide the 8 responses of an optimizer step",
        ),
        ({"loss_type": "cispo"}, "epsilon_high: None bounds the ratio itself"),
        ({"temperature": 0.0}, "rollout.temperature: 0 is greedy"),
        ({"bf16": None, "seed": -1}, "run.seed"),
    ],
)
def test_what_cannot_be_is_an_error_with_the_key(
    tmp_path: Path, said: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=r"grpo_config\.json") as raised:
        converted(tmp_path, DEFAULTS | said, world_size=1)
    assert error in str(raised.value)


def test_a_bound_of_tool_calls_says_where_tools_are_named(tmp_path: Path) -> None:
    *_, said = loaded(tmp_path, SAID | {"max_tool_calling_iterations": 5})
    (note,) = [line for line in said.splitlines() if line.startswith("max_tool_calling")]
    assert note == (
        "max_tool_calling_iterations=5: one less than `environments[].max_turns`: tools are named "
        "there (docs/own_environment.md)"
    )
