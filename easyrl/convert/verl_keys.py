"""verl's keys and ours: ``ppo_trainer.yaml`` and ``ppo_megatron_trainer.yaml`` of 0.9.1."""

from __future__ import annotations

from easyrl.convert.peer import Row, has_none, ignored, same
from easyrl.convert.values import TRACKERS, all_tokens, run_name, trackers

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
MODEL, REFERENCE = "actor_rollout_ref.model.", "actor_rollout_ref.ref."
OPTIMIZER = f"{ACTOR}optim."
MEGATRON = f"{ACTOR}megatron."
REWARD, OLD_REWARD = "reward.custom_reward_function.", "custom_reward_function."
STEPS = "times the updates: verl's step is a batch, ours an optimizer step"
OF_SERVER = "an option of the server: `vllm serve`, or `inference.launch.options`"
OF_LOSS = "a loss of its own: a recipe in a file (docs/recipes.md)"
PACKED = "rows are packed to `trainer.max_tokens_per_micro_batch`"
NOT_TRAINED = "nothing of what is trained depends on it"

ROWS = (
    # ---- batch and length ----
    Row("data.train_batch_size", 1024, "trainer.batch_size", "prompts in both", same),
    Row(
        f"{ACTOR}ppo_mini_batch_size",
        256,
        "trainer.updates_per_batch",
        "train_batch_size ÷ ppo_mini_batch_size",
    ),
    Row(
        f"{ACTOR}ppo_epochs",
        1,
        how="a response is trained once; `trainer.updates_per_batch` cuts a batch into slices, an "
        "optimizer step each",
    ),
    Row(f"{ROLLOUT}n", 1, "rollout.num_generations", value=same),
    Row("trainer.total_epochs", 30, "data.epochs", "not with total_training_steps"),
    Row("trainer.total_training_steps", None, "trainer.max_steps", STEPS),
    Row("trainer.save_freq", -1, "checkpoint.every_steps", STEPS),
    Row("trainer.test_freq", -1, "evaluation.every_steps", STEPS),
    Row("trainer.val_before_train", True, "evaluation.at_start"),
    Row("trainer.max_actor_ckpt_to_keep", None, "checkpoint.keep", value=same),
    has_none("trainer.critic_warmup", 0, "policy and critic are trained from the first batch"),
    # ---- the loss ----
    Row(
        "algorithm.adv_estimator",
        "gae",
        "recipe.name",
        "gae: ppo; grpo: grpo, or dual_clip with several updates; gdpo; reinforce_plus_plus: "
        "reinforce_pp; reinforce_plus_plus_baseline: reinforce_pp_baseline; rloo",
    ),
    Row(
        f"{ACTOR}policy_loss.loss_mode",
        "vanilla",
        "recipe.name",
        "gspo: gspo; cispo: cispo; no others",
    ),
    Row(
        "algorithm.norm_adv_by_std_in_grpo",
        True,
        "recipe.advantage",
        "true: group_std; false: group_mean",
    ),
    Row("algorithm.gamma", 1.0, "recipe.gamma", "of ppo"),
    Row("algorithm.lam", 1.0, "recipe.gae_lambda", "of ppo"),
    Row(
        f"{ACTOR}loss_agg_mode",
        "token-mean",
        "recipe.aggregation",
        "token-mean: token; seq-mean-token-mean: sequence; seq-mean-token-sum-norm: constant; no "
        "sums",
    ),
    Row(
        f"{ACTOR}loss_scale_factor", None, "recipe.aggregation", "constant has max_response_length"
    ),
    Row(
        f"{ACTOR}clip_ratio",
        0.2,
        "recipe.clip_eps_low, recipe.clip_eps_high",
        "where those two are null",
    ),
    Row(f"{ACTOR}clip_ratio_low", 0.2, "recipe.clip_eps_low"),
    Row(f"{ACTOR}clip_ratio_high", 0.2, "recipe.clip_eps_high"),
    Row(f"{ACTOR}clip_ratio_c", 3.0, "recipe.clip_ratio_c", "of dual_clip, with several updates"),
    Row(f"{ACTOR}entropy_coeff", 0.0, "recipe.entropy_coef"),
    Row(f"{ACTOR}use_kl_loss", False, "recipe.kl_coef", "false: 0"),
    Row(f"{ACTOR}kl_loss_coef", 0.001, "recipe.kl_coef"),
    Row(
        f"{ACTOR}kl_loss_type",
        "low_var_kl",
        "recipe.kl_estimator",
        "low_var_kl, k3: k3; mse, k2, and all with a +, whose gradient is k2's: k2; no kl, abs",
    ),
    Row("algorithm.use_kl_in_reward", False, "recipe.kl_in_reward_coef", "false: 0"),
    Row("algorithm.kl_ctrl.kl_coef", 0.001, "recipe.kl_in_reward_coef"),
    Row(
        "algorithm.kl_penalty",
        "kl",
        "recipe.kl_in_reward_estimator",
        "kl: k1; mse: k2; low_var_kl: k3",
    ),
    has_none("algorithm.kl_ctrl.type", "fixed", "the coefficient is fixed"),
    ignored("algorithm.kl_ctrl.*", "the coefficient is fixed"),
    Row("algorithm.filter_groups.enable", False, "recipe.dynamic_sampling"),
    Row(
        "algorithm.filter_groups.metric",
        "reward",
        how="the sum of the rewards is looked at",
        is_silent=True,  # told where groups are filtered
    ),
    Row(
        "algorithm.filter_groups.max_num_gen_batches",
        0,
        "trainer.max_draws_per_batch",
        "times gen_batch_size; 0: the default, 10 × batch_size",
    ),
    ignored("algorithm.filter_groups.max_inflight_gen_batches", "all prompts are drawn as needed"),
    Row("data.gen_batch_size", None, "trainer.max_draws_per_batch", "with filter_groups"),
    Row(
        "algorithm.rollout_correction.rollout_is",
        None,
        "recipe.importance_correction",
        "token: truncated",
    ),
    Row("algorithm.rollout_correction.rollout_is_threshold", 2.0, "recipe.importance_cap"),
    has_none(
        "algorithm.rollout_correction.rollout_rs", None, "no response is rejected for its ratio"
    ),
    has_none(
        "algorithm.rollout_correction.bypass_mode", False, "the old policy is the trainer's own"
    ),
    ignored("algorithm.rollout_correction.*", "`recipe.importance_correction`"),
    has_none("algorithm.use_pf_ppo", False, "`recipe.name: pf_ppo`"),
    ignored("algorithm.pf_ppo.*", "`recipe.name: pf_ppo`"),
    ignored(f"{ACTOR}policy_loss.*", OF_LOSS),
    has_none("distillation.enabled", False, "`recipe.name: distillation`"),
    ignored("distillation.*", "`recipe.name: distillation`"),
    # ---- data, sampling and rewards ----
    Row("data.train_files", None, "data.files", "files on disk"),
    Row(
        "data.val_files",
        None,
        "evaluation.data.files",
        "where test_freq or val_before_train asks; several are sets with the names of the files",
    ),
    Row("data.prompt_key", "prompt", "data.fields.prompt", value=same),
    Row("data.max_prompt_length", 512, "data.max_prompt_tokens", value=same),
    Row("data.max_response_length", 512, "rollout.max_tokens", value=same),
    Row("data.filter_overlong_prompts", False, "data.on_long_prompt", "true: skip"),
    Row("data.truncation", "error", "data.on_long_prompt", "error: fail; prompts are never cut"),
    Row("data.shuffle", True, "data.shuffle", value=same),
    Row("data.seed", None, "run.seed", value=same),
    Row("data.train_max_samples", -1, "data.max_records", "-1: all"),
    Row("data.apply_chat_template_kwargs", None, "data.chat_template_kwargs"),
    has_none("data.custom_cls.path", None, "records are read from files: `data.files`"),
    Row(f"{ROLLOUT}temperature", 1.0, "rollout.temperature", value=same),
    Row(f"{ROLLOUT}top_p", 1.0, "rollout.top_p", "with `rollout.allow_off_policy_sampling`", same),
    Row(
        f"{ROLLOUT}top_k",
        -1,
        "rollout.top_k",
        "with `rollout.allow_off_policy_sampling`",
        all_tokens,
    ),
    Row(f"{ROLLOUT}ignore_eos", False, "rollout.ignore_eos", value=same),
    has_none(f"{ROLLOUT}do_sample", True, "responses are sampled"),
    Row(f"{ROLLOUT}val_kwargs.temperature", 0.0, "evaluation.sampling.temperature"),
    Row(f"{ROLLOUT}val_kwargs.top_p", 1.0, "evaluation.sampling.top_p"),
    Row(f"{ROLLOUT}val_kwargs.top_k", -1, "evaluation.sampling.top_k"),
    Row(f"{ROLLOUT}val_kwargs.n", 1, "evaluation.num_samples"),
    Row(f"{ROLLOUT}val_kwargs.do_sample", False, "evaluation.sampling.temperature", "false: 0"),
    has_none(
        f"{ROLLOUT}multi_turn.enable",
        False,
        "`environments[].tools`, or a coroutine, `environments[].file` (docs/own_environment.md)",
    ),
    has_none(f"{ROLLOUT}multi_turn.max_assistant_turns", None, "`environments[].max_turns`"),
    has_none(
        f"{ROLLOUT}multi_turn.function_tool_path",
        None,
        "`environments[].tools[].file`: the functions without the decorator",
    ),
    has_none(
        f"{ROLLOUT}multi_turn.tool_config_path",
        None,
        "tools with a state: a coroutine, `environments[].file`",
    ),
    ignored(f"{ROLLOUT}multi_turn.*", "of tools"),
    has_none(
        f"{ROLLOUT}agent.agent_loop_config_path",
        None,
        "loops of one's own: coroutines, `environments[].file`",
    ),
    Row(f"{REWARD}path", None, "rewards", "a file entry with signature verl"),
    Row(f"{REWARD}name", "compute_score", "rewards"),
    Row(f"{OLD_REWARD}path", None, "rewards", "of older versions"),
    Row(f"{OLD_REWARD}name", None, "rewards", "of older versions"),
    has_none("reward.reward_model.enable", False, "`rewards: [{name: reward_model, …}]`"),
    has_none("reward_model.enable", None, "`rewards: [{name: reward_model, …}]`"),
    has_none("reward.reward_manager.name", "naive", "`rewards`; of dapo recipe.overlong_buffer"),
    has_none("reward_model.reward_manager", None, "`rewards`; of dapo recipe.overlong_buffer"),
    *(
        has_none(
            f"{section}overlong_buffer{config}.enable", False, "the built-in reward `overlong`"
        )
        for section, config in (("reward_model.", ""), ("reward.reward_kwargs.", "_cfg"))
    ),
    ignored("reward.*", "`rewards`"),
    ignored("reward_model.*", "`rewards`"),
    # ---- model and optimizer ----
    Row(f"{MODEL}path", None, "model.path", "a folder, or a Hub id", same),
    Row(f"{MODEL}tokenizer_path", None, "model.tokenizer", value=same),
    Row(
        f"{MODEL}enable_gradient_checkpointing",
        True,
        "model.activation_checkpointing",
        "false: none",
    ),
    Row(f"{MODEL}lora_rank", 0, "model.lora.rank", "0: none"),
    Row(f"{MODEL}lora_alpha", 16.0, "model.lora.alpha"),
    Row(f"{MODEL}target_modules", "all-linear", "model.lora.target_modules"),
    has_none(f"{MODEL}trust_remote_code", False, "architectures are those of transformers"),
    has_none(f"{MODEL}custom_chat_template", None, "`data.chat_template`, a file"),
    has_none(f"{MODEL}override_config", None, "config.json is taken as it is"),
    ignored(f"{MODEL}*", NOT_TRAINED),
    Row(f"{OPTIMIZER}lr", 1e-6, "trainer.learning_rate", value=same),
    Row(f"{OPTIMIZER}lr_warmup_steps", -1, "trainer.warmup_steps", STEPS),
    Row(
        f"{OPTIMIZER}lr_warmup_steps_ratio", 0.0, "trainer.warmup_steps", "of total_training_steps"
    ),
    Row(f"{OPTIMIZER}lr_scheduler_type", "constant", "trainer.lr_schedule", "constant, cosine"),
    Row(f"{OPTIMIZER}warmup_style", None, "trainer.lr_schedule", "of older versions"),
    Row(f"{OPTIMIZER}min_lr_ratio", 0.0, "trainer.min_lr_ratio", "of cosine"),
    Row(f"{OPTIMIZER}weight_decay", 0.01, "trainer.weight_decay", value=same),
    Row(f"{OPTIMIZER}betas", [0.9, 0.999], "trainer.adam_betas", value=list),
    Row(f"{OPTIMIZER}clip_grad", 1.0, "trainer.max_grad_norm", value=same),
    has_none(f"{OPTIMIZER}optimizer", "AdamW", "`trainer.optimizer`: adamw, adam8bit, muon"),
    has_none(f"{OPTIMIZER}num_cycles", 0.5, "half a cosine"),
    ignored(f"{OPTIMIZER}*", NOT_TRAINED),
    Row(f"{ACTOR}grad_clip", 1.0, "trainer.max_grad_norm", "of FSDP in older versions"),
    Row("critic.optim.lr", 1e-5, "critic.learning_rate", "of ppo"),
    Row("critic.optim.weight_decay", 0.01, "critic.weight_decay", "of ppo"),
    Row("critic.model.path", None, "critic.path", "of ppo"),
    Row("critic.cliprange_value", 0.5, "recipe.value_clip", "of ppo"),
    ignored("critic.*", "the critic is trained as the policy is"),
    # ---- machine ----
    Row(f"{ACTOR}use_dynamic_bsz", False, "trainer.max_tokens_per_micro_batch", "true"),
    Row(
        f"{ACTOR}ppo_max_token_len_per_gpu",
        16384,
        "trainer.max_tokens_per_micro_batch",
        "with use_dynamic_bsz",
    ),
    ignored(f"{ACTOR}ppo_micro_batch_size*", PACKED),
    Row(f"{ACTOR}fsdp_config.optimizer_offload", False, "trainer.offload_optimizer"),
    Row(f"{REFERENCE}fsdp_config.param_offload", False, "trainer.offload_reference"),
    has_none(f"{ACTOR}fsdp_config.param_offload", False, "`trainer.zero_stage: 3` shards weights"),
    has_none(
        f"{ACTOR}ulysses_sequence_parallel_size", 1, "`parallel.tensor` and `parallel.sequence`"
    ),
    ignored(f"{ACTOR}fsdp_config.*", "`trainer.zero_stage`: 3 shards as FSDP does"),
    Row(f"{ACTOR}strategy", "fsdp", "parallel.*", "megatron: the keys below"),
    Row(f"{MEGATRON}tensor_model_parallel_size", 1, "parallel.tensor"),
    Row(f"{MEGATRON}pipeline_model_parallel_size", 1, "parallel.pipeline"),
    Row(f"{MEGATRON}virtual_pipeline_model_parallel_size", None, "parallel.chunks_per_stage"),
    Row(f"{MEGATRON}sequence_parallel", True, "parallel.sequence", "with several tensor ranks"),
    has_none(f"{MEGATRON}context_parallel_size", 1, "`parallel.tensor` with `parallel.sequence`"),
    has_none(f"{MEGATRON}expert_model_parallel_size", 1, "`trainer.zero_stage: 3`"),
    ignored(f"{MEGATRON}*", NOT_TRAINED),
    Row(
        f"{ROLLOUT}tensor_model_parallel_size",
        2,
        how="`--tensor-parallel-size` of `vllm serve`, or `inference.launch.tensor_parallel`: "
        "servers have devices of their own",
    ),
    has_none(f"{ROLLOUT}max_model_len", None, OF_SERVER),
    ignored(f"{ROLLOUT}*", OF_SERVER),
    ignored(f"{REFERENCE}*", PACKED),
    ignored(f"{ACTOR}*", NOT_TRAINED),
    ignored("actor_rollout_ref.hybrid_engine", "servers have devices of their own"),
    ignored("actor_rollout_ref.nccl_timeout", "`watchdog.peer_timeout_s`"),
    ignored("trainer.n_gpus_per_node", "`deepspeed --include`, `--num_gpus`"),
    ignored("trainer.nnodes", "`deepspeed --hostfile`"),
    # ---- what is written ----
    Row("trainer.project_name", "verl_examples", "run.project", value=same),
    Row("trainer.experiment_name", "gsm8k", "run.name", "letters, digits, _, - and .", run_name),
    Row("trainer.logger", None, "run.trackers", ", ".join(TRACKERS), trackers),
    Row("trainer.default_local_dir", None, "run.output_dir", value=same),
    has_none("trainer.resume_mode", "auto", "`easyrl train CONFIG --resume`"),
    *(
        ignored(pattern, NOT_TRAINED)
        for pattern in (
            *("trainer.*", "data.*", "global_profiler.*", "transfer_queue.*", "sandbox_fusion.*"),
            *("ray_kwargs.*", "model_engine", "hydra.*", "skip.*"),
        )
    ),
)
