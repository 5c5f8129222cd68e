"""verl's configurations as ours: the same prompts, lengths, loss and schedule, or a word on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from easyrl.config import Config, ConfigError
from easyrl.config.file import load_config
from easyrl.convert.convert import convert_file
from easyrl.recipes import Recipe
from easyrl.recipes.estimators import kl_estimate
from easyrl.recipes.loading import load_recipe

SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
# data.train_batch_size=1 is what a comment says
prompts=64
mini=${prompts}
n_resp=16
max_response=$((1024 * 8))
export MODEL_PATH="models/qwen"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="['data/a.parquet','data/b.parquet']" \
    data.val_files=data/test.parquet \
    data.prompt_key=question \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=${mini} \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.entropy_coeff=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=$n_resp \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    algorithm.use_kl_in_reward=False \
    trainer.logger='["console","tensorboard"]' \
    trainer.project_name=maths \
    trainer.experiment_name='grpo_8b' \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    +trainer.something_new=3 \
    trainer.total_epochs=15 "$@"
"""


def loaded(tmp_path: Path, text: str, name: str = "run.sh") -> tuple[Config, Recipe, str]:
    """The written file as a run reads it, its recipe, and what was said."""
    file = tmp_path / name
    file.write_text(text)
    rewards = {"rewards": [{"name": "math"}]}
    made = convert_file(file, further=rewards)
    written = tmp_path / "easyrl.yaml"
    written.write_text(made.text(name))
    config = load_config(written)
    return config, load_recipe(config), "\n".join(map(str, made.notes))


def overridden(tmp_path: Path, *settings: str) -> tuple[Config, Recipe, str]:
    base = ["data.train_files=p.parquet", "actor_rollout_ref.model.path=m"]
    base += ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]
    return loaded(tmp_path, "\n".join([*base, *settings]))


def test_a_script_means_the_same(tmp_path: Path) -> None:
    config, recipe, said = loaded(tmp_path, SCRIPT)
    trainer, rollout = config.trainer, config.rollout
    assert (trainer.batch_size, trainer.updates_per_batch) == (256, 4)  # mini-batches of 64 prompts
    assert (rollout.num_generations, rollout.max_tokens) == (16, 2048)
    assert config.data.max_prompt_tokens == 1024 and config.data.on_long_prompt == "skip"
    assert [str(file) for file in config.data.files] == ["data/a.parquet", "data/b.parquet"]
    assert config.data.fields.prompt == "question" and config.data.epochs == 15
    assert config.data.fields.answer == "reward_model.ground_truth"
    assert (trainer.learning_rate, trainer.weight_decay) == (2e-6, 0.1)
    assert trainer.warmup_steps == 40  # verl's schedule has a step for a batch
    assert config.recipe.name == "dual_clip"  # verl's clipped surrogate has the third bound
    assert recipe.clip_ratio_c == 10.0  # type: ignore[attr-defined]
    assert (recipe.clip_eps_low, recipe.clip_eps_high) == (0.2, 0.28)  # type: ignore[attr-defined]
    assert (recipe.kl_coef, recipe.kl_estimator) == (0.002, "k3")  # type: ignore[attr-defined]
    assert recipe.aggregation == "sequence" and recipe.advantage == "group_std"  # type: ignore[attr-defined]
    assert recipe.entropy_coef == 0.001  # type: ignore[attr-defined]
    assert config.checkpoint.every_steps == 80 and str(config.model.path) == "models/qwen"
    assert config.evaluation is not None and config.evaluation.every_steps == 20
    assert config.evaluation.sampling.temperature == 0.0
    assert config.evaluation.sampling.max_tokens == 2048
    assert (config.run.name, config.run.project) == ("grpo_8b", "maths")
    assert config.run.trackers == ["tensorboard"]
    told = said.splitlines()
    assert len(told) == 2  # tensor parallelism of the server, and that there is one
    assert "tensor_model_parallel_size=4: `--tensor-parallel-size`" in told[0]


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ("[data/aime24.parquet,data/math-500.parquet]", ["aime24", "math-500"]),
        ("[gsm8k/test.parquet,math/test.parquet]", ["gsm8k", "math"]),
        ("[a/data.parquet,b/data.parquet]", ["a", "b"]),
        ("[1/test.parquet,2/test.parquet]", [""]),
        ("[data/aime24.parquet]", [""]),
    ],
)
def test_several_held_out_files_are_sets_with_names(tmp_path: Path, files, names) -> None:
    script = SCRIPT.replace("data.val_files=data/test.parquet", f"data.val_files='{files}'")
    assert script != SCRIPT
    config, _, _ = loaded(tmp_path, script)
    assert config.evaluation is not None
    sets = config.evaluation.sets
    assert list(sets) == names
    given = [str(file) for each in sets.values() for file in each.data.files]
    assert given == files.strip("[]").split(",")
    assert {each.sampling.max_tokens for each in sets.values()} == {2048}


TREE = """
actor_rollout_ref:
  actor: {ppo_mini_batch_size: 32, optim: {lr: 1e-6}, loss_agg_mode: token-mean, use_kl_loss: false}
  rollout: {n: 8, response_length: "${data.max_response_length}"}
  model: {path: models/m}
data: {train_files: train.parquet, train_batch_size: 32, max_response_length: 256}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false}
"""


def test_a_nested_file_its_overrides_and_dotted_keys_are_the_same(tmp_path: Path) -> None:
    one, recipe, _ = loaded(tmp_path, TREE, "config.yaml")
    assert (one.trainer.batch_size, one.trainer.updates_per_batch) == (32, 1)
    assert one.recipe.name == "grpo"  # with one update no bound acts
    assert recipe.advantage == "group_mean"  # type: ignore[attr-defined]
    keys = [
        *(
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
            "actor_rollout_ref.actor.optim.lr=1e-6",
        ),
        *("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.model.path=models/m"),
        *("data.train_files=train.parquet", "data.train_batch_size=32"),
        *("data.max_response_length=256", "algorithm.adv_estimator=grpo"),
        "++algorithm.norm_adv_by_std_in_grpo=False",
    ]
    listed = "\n".join(f"- {key}" for key in keys)
    dotted = "\n".join(key.lstrip("+").replace("=", ": ", 1) for key in keys)
    assert loaded(tmp_path, listed, "overrides.yaml")[0] == one
    assert loaded(tmp_path, dotted, "dotted.yaml")[0] == one
    assert loaded(tmp_path, " ".join(keys), "keys.txt")[0] == one


def test_a_reference_to_another_file_is_an_error_where_it_matters(tmp_path: Path) -> None:
    elsewhere = TREE.replace("n: 8,", 'n: 8, prompt_length: "${not.here}",')
    config, _, _ = loaded(tmp_path, elsewhere, "config.yaml")
    assert config.rollout.max_tokens == 256
    with pytest.raises(ConfigError, match=r"rollout\.n: \$\{not\.here\} is of another file"):
        loaded(tmp_path, TREE.replace("n: 8,", 'n: "${not.here}",'), "config.yaml")


A = "actor_rollout_ref.actor."


@pytest.mark.parametrize(
    ("settings", "name", "expected"),
    [
        ([f"{A}policy_loss.loss_mode=gspo"], "gspo", {"aggregation": "token"}),
        (
            [f"{A}policy_loss.loss_mode=cispo", f"{A}clip_ratio_high=0.3"],
            "cispo",
            {"clip_eps_low": 0.2, "clip_eps_high": 0.3},
        ),
        (["algorithm.adv_estimator=gae"], "ppo", {"gae_lambda": 1.0, "value_clip": 0.5}),
        (["algorithm.adv_estimator=gdpo"], "gdpo", {"aggregation": "token"}),
        (["algorithm.adv_estimator=reinforce_plus_plus"], "reinforce_pp", {"kl_coef": 0.0}),
        (
            ["algorithm.adv_estimator=reinforce_plus_plus_baseline"],
            "reinforce_pp_baseline",
            {"kl_coef": 0.0},
        ),
        (["algorithm.adv_estimator=rloo"], "rloo", {"kl_in_reward_coef": 0.0}),
        (
            [f"{A}clip_ratio_low=null", f"{A}clip_ratio_high=null", f"{A}clip_ratio=0.1"],
            "dual_clip",
            {"clip_eps_low": 0.1, "clip_eps_high": 0.1, "clip_ratio_c": 3.0},
        ),
        (
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.01"],
            "dual_clip",
            {"kl_in_reward_coef": 0.01, "kl_in_reward_estimator": "k1", "kl_coef": 0.0},
        ),
        (
            [f"{A}use_kl_loss=true", f"{A}kl_loss_type=k3+"],
            "dual_clip",
            {"kl_coef": 0.001, "kl_estimator": "k2"},
        ),
        (
            [f"{A}loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=100"],
            "dual_clip",
            {"aggregation": "constant"},
        ),
        (["algorithm.filter_groups.enable=true"], "dual_clip", {"dynamic_sampling": True}),
        (
            ["algorithm.rollout_correction.rollout_is=token"],
            "dual_clip",
            {"importance_correction": "truncated", "importance_cap": 2.0},
        ),
    ],
)
def test_losses(tmp_path: Path, settings: list[str], name: str, expected: dict[str, Any]) -> None:
    config, recipe, _ = overridden(tmp_path, *settings)
    assert config.recipe.name == name
    assert {key: getattr(recipe, key) for key in expected} == expected


def test_a_plus_has_the_gradient_of_k2() -> None:
    """verl's straight-through form: the value of one estimator, the gradient of half a square."""
    generator = torch.Generator().manual_seed(1)
    policy = torch.randn(30, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(30, generator=generator, dtype=torch.float64)
    backward = 0.5 * (policy - reference).square()
    value = kl_estimate(policy, reference, "k3")
    (theirs,) = torch.autograd.grad(
        (backward - backward.detach() + value.detach()).sum(), policy, retain_graph=True
    )
    (ours,) = torch.autograd.grad(kl_estimate(policy, reference, "k2").sum(), policy)
    torch.testing.assert_close(ours, theirs)


def test_draws_of_filtered_groups_steps_and_schedules(tmp_path: Path) -> None:
    config, _, _ = overridden(
        tmp_path,
        "data.train_batch_size=64",
        f"{A}ppo_mini_batch_size=32",
        "data.gen_batch_size=96",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=5",
        "trainer.total_training_steps=100",
        f"{A}optim.lr_warmup_steps_ratio=0.05",
        f"{A}optim.lr_scheduler_type=cosine",
        f"{A}optim.min_lr_ratio=0.1",
        f"{A}use_dynamic_bsz=true",
        f"{A}ppo_max_token_len_per_gpu=9000",
        "trainer.save_freq=-1",
    )
    trainer = config.trainer
    assert trainer.max_draws_per_batch == 5 * 96
    assert (trainer.max_steps, trainer.warmup_steps) == (200, 10)
    assert (trainer.lr_schedule, trainer.min_lr_ratio) == ("cosine", 0.1)
    assert trainer.max_tokens_per_micro_batch == 9000 and config.checkpoint.every_steps == 0


def test_parallelism_of_megatron_and_adapters(tmp_path: Path) -> None:
    config, _, said = overridden(
        tmp_path,
        f"{A}strategy=megatron",
        f"{A}megatron.tensor_model_parallel_size=4",
        f"{A}megatron.pipeline_model_parallel_size=2",
        f"{A}megatron.virtual_pipeline_model_parallel_size=2",
        f"{A}megatron.context_parallel_size=2",
    )
    parallel = config.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.chunks_per_stage) == (4, 2, 2)
    assert parallel.sequence and config.trainer.zero_stage == 1
    assert "context_parallel_size=2: `parallel.tensor`" in said
    config, _, _ = overridden(
        tmp_path, "actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.lora_alpha=64"
    )
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.alpha) == (32, 64.0)


def test_a_reward_function_runs_as_verls(tmp_path: Path) -> None:
    function = tmp_path / "score.py"
    function.write_text("def my_score(data_source, solution_str, ground_truth, extra_info): ...")
    script = "\n".join(
        [
            "algorithm.adv_estimator=grpo",
            f"reward.custom_reward_function.path={function}",
            "reward.custom_reward_function.name=my_score",
        ]
    )
    (tmp_path / "run.sh").write_text(script)
    made = convert_file(tmp_path / "run.sh")
    assert made.settings["rewards"] == [
        {"file": str(function), "function": "my_score", "signature": "verl"}
    ]
    assert not [note for note in made.notes if note.theirs == "rewards"]
    function.unlink()
    missing = convert_file(tmp_path / "run.sh")
    assert "rewards" not in missing.settings and "--reward" in "\n".join(map(str, missing.notes))


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (f"{A}ppo_epochs=2", "ppo_epochs=2: a response is trained once"),
        ("algorithm.adv_estimator=remax", "adv_estimator=remax: has no counterpart"),
        (f"{A}policy_loss.loss_mode=kl_cov", "loss_mode=kl_cov: has no counterpart"),
        (f"{A}loss_agg_mode=token-sum", "loss_agg_mode=token-sum: a sum has no counterpart"),
        ("algorithm.kl_ctrl.type=adaptive", "kl_ctrl.type=adaptive: the coefficient is fixed"),
        ("data.truncation=left", "data.truncation=left: a prompt is never cut"),
        ("reward_model.overlong_buffer.enable=true", "the built-in reward `overlong`"),
        (f"{A}ulysses_sequence_parallel_size=4", "`parallel.tensor` and `parallel.sequence`"),
        ("something.of.mine=4", "something.of.mine: not looked at"),
        (f"{A}optim.lr_warmup_steps_ratio=0.1", "is a share of the run's steps"),
    ],
)
def test_what_has_no_counterpart_is_said(tmp_path: Path, setting: str, told: str) -> None:
    assert told in overridden(tmp_path, setting)[2]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ([f"{A}ppo_mini_batch_size=96"], f"{A}ppo_mini_batch_size: 96 does not divide"),
        ([f"{A}optim.lr=fast"], f"{A}optim.lr: 'fast' is no number"),
        (["data.train_batch_size=0"], "data.train_batch_size: 0 is no whole number"),
        ([f"{A}optim.lr_scheduler_type=linear"], "lr_scheduler_type: 'linear' is none of constant"),
        (["data.train_batch_size=$((8 * 4))"], "data.train_batch_size: $((8 * 4)) is left to"),
        (["data.shuffle=maybe"], "data.shuffle: 'maybe' is not true or false"),
    ],
)
def test_what_cannot_be_is_an_error_with_the_key(
    tmp_path: Path, settings: list[str], error: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        overridden(tmp_path, *(f"'{s}'" if "$" in s else s for s in settings))
    assert error in str(raised.value)


def test_tools_say_which_environment_they_are(tmp_path: Path) -> None:
    of = "actor_rollout_ref.rollout."
    *_, said = overridden(
        tmp_path,
        f"{of}multi_turn.enable=True",
        f"{of}multi_turn.max_assistant_turns=5",
        f"{of}multi_turn.function_tool_path=tools.py",
        f"{of}multi_turn.format=hermes",
        f"{of}agent.agent_loop_config_path=agents.yaml",
    )
    told = [line for line in said.splitlines() if "multi_turn" in line or "agent" in line]
    assert [line.partition(": ")[2].partition("`")[2].partition("`")[0] for line in told] == [
        *("environments[].tools", "environments[].max_turns"),
        *("environments[].tools[].file", "environments[].file"),
    ]
