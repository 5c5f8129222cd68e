"""TRL's keys and ours: ``GRPOConfig`` 1.16 with Hugging Face's ``TrainingArguments`` below it.

Also what TRL's command line keeps beside it: model, dataset and adapters.
"""

from __future__ import annotations

from easyrl.convert.peer import Row, has_none, ignored, same
from easyrl.convert.values import TRACKERS, run_name, trackers

BATCH = "per_device_train_batch_size"
SHARE = "B · W · S ÷ G prompts, of which a step has B · W · A ÷ G (below)"
OF_VLLM = "an option of the server: `vllm serve`, or `inference.launch.options`"
OF_LOSS = "a loss of its own: a recipe in a file (docs/recipes.md)"
NOT_TRAINED = "nothing of what is trained depends on it"

ROWS = (
    # ---- batch and length ----
    Row(BATCH, 8, "trainer.batch_size", SHARE),
    Row("gradient_accumulation_steps", 1, "trainer.updates_per_batch", "S ÷ A (below)"),
    Row("generation_batch_size", None, "trainer.batch_size", SHARE),
    Row("steps_per_generation", None, "trainer.updates_per_batch", "S ÷ A (below)"),
    Row("num_generations", 8, "rollout.num_generations", value=same),
    Row(
        "num_iterations",
        1,
        how="a response is trained once; `trainer.updates_per_batch` cuts a batch into slices, an "
        "optimizer step each",
        is_silent=True,  # told with the run's length
    ),
    Row("max_steps", -1, "trainer.max_steps", "optimizer steps in both; a multiple of the updates"),
    Row("num_train_epochs", 3.0, "data.epochs", "rounded up; not with max_steps"),
    Row("warmup_steps", 0.0, "trainer.warmup_steps", "below 1 a share of max_steps"),
    Row("warmup_ratio", 0.0, "trainer.warmup_steps", "of max_steps"),
    # ---- the loss ----
    Row(
        "loss_type",
        "dapo",
        "recipe.name, recipe.aggregation",
        "grpo: sequence; dapo, bnpo: token; dr_grpo: constant; cispo: recipe cispo; no sapo, "
        "luspo, vespo",
    ),
    Row("importance_sampling_level", "token", "recipe.name", "sequence: recipe gspo"),
    Row("beta", 0.0, "recipe.kl_coef"),
    Row(
        "use_bias_correction_kl",
        True,
        "recipe.kl_estimator",
        "true: k2, which has its gradient where the ratio is 1; false: k3",
    ),
    Row("epsilon", 0.2, "recipe.clip_eps_low", "of cispo 1.0, as it has no lower bound"),
    Row(
        "epsilon_high",
        None,
        "recipe.clip_eps_high",
        "default: epsilon; of cispo less 1, as TRL's bounds the ratio itself",
    ),
    Row("delta", None, "recipe.delta", "recipe two_sided"),
    Row(
        "scale_rewards",
        "group",
        "recipe.advantage",
        "group: group_std; none: group_mean; no batch",
    ),
    Row(
        "multi_objective_aggregation",
        "sum_then_normalize",
        "recipe.name",
        "normalize_then_sum: recipe gdpo",
    ),
    Row("reward_weights", None, how="`weight` of each entry of `rewards`"),
    Row("mask_truncated_completions", False, "recipe.mask_truncated"),
    Row("entropy_coef", 0.0, "recipe.entropy_coef"),
    Row("use_adaptive_entropy", False, "recipe.entropy_target"),
    Row("entropy_target", 0.2, "recipe.entropy_target", "with use_adaptive_entropy"),
    Row("entropy_coef_delta", 0.005, "recipe.entropy_coef_step", "with use_adaptive_entropy"),
    Row("entropy_coef_max", 1.0, "recipe.entropy_coef_max", "with use_adaptive_entropy"),
    Row("entropy_coef_min", 0.0, how="the coefficient goes down to 0", is_silent=True),
    has_none("top_entropy_quantile", 1.0, OF_LOSS),
    has_none(
        "off_policy_mask_threshold", None, "no response is off-policy but by updates_per_batch"
    ),
    ignored("sapo_*", OF_LOSS),
    ignored("vespo_*", OF_LOSS),
    has_none("sync_ref_model", False, "the reference is model.path throughout"),
    ignored("ref_model_*", "the reference is model.path throughout"),
    has_none("router_aux_loss_coef", None, "no auxiliary loss: `model.ignore_router_aux_loss`"),
    ignored("disable_dropout", "dropout is off"),
    has_none("cast_lm_head_to_fp32", False, "log-probabilities are made in fp32 of the logits"),
    has_none("label_smoothing_factor", 0.0, OF_LOSS),
    has_none("neftune_noise_alpha", None, "no noise is added to embeddings"),
    # ---- sampling and data ----
    Row("max_completion_length", 512, "rollout.max_tokens", value=same),
    Row(
        "max_prompt_length",
        None,
        "data.max_prompt_tokens",
        "of older versions, which cut a prompt; here a longer one is skipped",
        value=same,
    ),
    Row("temperature", 1.0, "rollout.temperature", value=same),
    Row("top_p", 1.0, "rollout.top_p", "with `rollout.allow_off_policy_sampling`"),
    Row("top_k", 0, "rollout.top_k", "0: -1; with `rollout.allow_off_policy_sampling`"),
    Row("min_p", None, "rollout.min_p", "with `rollout.allow_off_policy_sampling`"),
    Row(
        "repetition_penalty",
        1.0,
        "rollout.repetition_penalty",
        "with `rollout.allow_off_policy_sampling`",
    ),
    Row("generation_kwargs", None, "rollout.*", "stop, stop_token_ids, min_tokens, penalties"),
    Row("chat_template_kwargs", None, "data.chat_template_kwargs", value=same),
    Row("shuffle_dataset", True, "data.shuffle", value=same),
    Row("seed", 42, "run.seed", value=same),
    has_none("data_seed", None, "run.seed is that of the prompts' order, too"),
    has_none(
        "max_tool_calling_iterations",
        None,
        "one less than `environments[].max_turns`: tools are named there (docs/own_environment.md)",
    ),
    has_none("vllm_structured_outputs_regex", None, "responses are sampled without a grammar"),
    Row("model_name_or_path", None, "model.path", "a folder, or a Hub id", value=same),
    Row("dataset_name", None, "data.dataset", value=same),
    Row("dataset_config", None, "data.subset", value=same),
    Row("dataset_train_split", None, "data.split", value=same),
    has_none("trust_remote_code", False, "architectures are those of transformers"),
    ignored("model_init_kwargs", "`model.dtype`, `model.attention`"),
    # ---- optimizer ----
    Row("learning_rate", 1e-6, "trainer.learning_rate", value=same),
    Row("lr_scheduler_type", "linear", "trainer.lr_schedule", "constant, linear, cosine"),
    Row("lr_scheduler_kwargs", None, "trainer.min_lr_ratio", "min_lr of cosine_with_min_lr"),
    Row("optim", "adamw_torch_fused", "trainer.optimizer", "adamw, adam8bit"),
    Row("weight_decay", 0.0, "trainer.weight_decay", value=same),
    Row("adam_beta1", 0.9, "trainer.adam_betas"),
    Row("adam_beta2", 0.999, "trainer.adam_betas"),
    Row("adam_epsilon", 1e-8, "trainer.adam_eps", value=same),
    Row("max_grad_norm", 1.0, "trainer.max_grad_norm", value=same),
    # ---- machine ----
    Row("bf16", None, "model.dtype", "false: fp32"),
    Row("fp16", False, "model.dtype", "none: bf16 is written"),
    Row("gradient_checkpointing", True, "model.activation_checkpointing", "false: none"),
    ignored("gradient_checkpointing_kwargs", "`model.activation_checkpointing`"),
    ignored("activation_checkpointing*", "`model.activation_checkpointing`"),
    Row("deepspeed", None, "trainer.zero_stage, trainer.offload_optimizer", "of a mapping"),
    has_none("fsdp", None, "`trainer.zero_stage: 3`"),
    ignored("fsdp_config", "`trainer.zero_stage: 3`"),
    has_none("parallelism_config", None, "`parallel.tensor`, `parallel.pipeline`"),
    has_none("use_liger_kernel", False, "`model.fused_layers`"),
    ignored("liger_kernel_config", "`model.fused_layers`"),
    Row("use_vllm", False, "inference.*", "inference has servers of its own"),
    Row("vllm_mode", "colocate", "inference.*", "server: endpoints; colocate: inference.launch"),
    Row("vllm_server_base_url", None, "inference.endpoints"),
    Row("vllm_server_host", "0.0.0.0", "inference.endpoints"),
    Row("vllm_server_port", 8000, "inference.endpoints"),
    Row("vllm_tensor_parallel_size", 1, "inference.launch.tensor_parallel", "by hand"),
    ignored("vllm_gpu_memory_utilization", OF_VLLM),
    has_none("vllm_max_model_length", None, OF_VLLM),
    ignored("vllm_model_impl", OF_VLLM),
    ignored("vllm_enable_sleep_mode", "servers have devices of their own"),
    ignored("vllm_server_timeout", "`inference.startup_timeout_s`"),
    ignored("vllm_group_port", "`weight_sync.port`"),
    Row("vllm_importance_sampling_correction", True, "recipe.importance_correction", "with vLLM"),
    Row(
        "vllm_importance_sampling_mode",
        "sequence_mask",
        "recipe.importance_correction",
        "token_truncate: truncated; token_mask: masked, with clip_min = 1 / clip_max",
    ),
    Row("vllm_importance_sampling_clip_max", 3.0, "recipe.importance_cap"),
    Row("vllm_importance_sampling_clip_min", None, "recipe.importance_cap"),
    Row("vllm_importance_sampling_cap", None, "recipe.importance_cap", "its older name"),
    ignored("ds3_gather_for_generation", "servers have the weights whole"),
    # ---- what is written ----
    Row("output_dir", None, "run.output_dir", value=same),
    Row("run_name", None, "run.name", "letters, digits, _, - and .", value=run_name),
    Row("report_to", None, "run.trackers", ", ".join(TRACKERS), value=trackers),
    Row("save_strategy", "steps", "checkpoint.every_steps", "steps, no"),
    Row("save_steps", 500.0, "checkpoint.every_steps"),
    Row("save_total_limit", None, "checkpoint.keep", value=same),
    has_none("eval_strategy", "no", "`evaluation` with data of its own: docs/configuration.md"),
    ignored("eval_*", "`evaluation`"),
    ignored("per_device_eval_batch_size", "`evaluation`"),
    ignored("num_generations_eval", "`evaluation.num_samples`"),
    has_none("log_completions", False, "`samples` (docs/samples.md); `easyrl samples` shows them"),
    has_none("log_completions_hub_repo", None, "nothing is uploaded"),
    has_none("load_best_model_at_end", False, "checkpoints stay: `checkpoint.keep`"),
    has_none("resume_from_checkpoint", None, "`easyrl train CONFIG --resume`"),
    has_none("auto_find_batch_size", False, "`trainer.max_tokens_per_micro_batch`"),
    # ---- adapters, of the command line ----
    Row("use_peft", False, "model.lora"),
    Row("lora_r", 16, "model.lora.rank", "with use_peft"),
    Row("lora_alpha", 32.0, "model.lora.alpha", "with use_peft"),
    Row("lora_target_modules", None, "model.lora.target_modules", "with use_peft"),
    Row("lora_dropout", 0.05, how="adapters have no dropout", is_silent=True),
    has_none("load_in_4bit", False, "weights are not quantised"),
    has_none("load_in_8bit", False, "weights are not quantised"),
    *(
        ignored(pattern, NOT_TRAINED)
        for pattern in (
            *("hub_*", "push_to_hub", "log_*", "logging_*", "dataloader_*", "ddp_*", "trackio_*"),
            *("torch_compile*", "include_*", "skip_memory_metrics", "save_*", "do_*", "debug"),
            *("disable_tqdm", "project", "tf32", "bf16_full_eval", "fp16_full_eval", "local_rank"),
            *("use_cpu", "accelerator_config", "remove_unused_columns", "label_names"),
            *("pad_to_multiple_of", "cache_implementation", "use_cache", "full_determinism"),
            *("train_sampling_strategy", "length_column_name", "batch_eval_metrics"),
            *("prediction_loss_only", "metric_for_best_model", "greater_is_better"),
            *("ignore_data_skip", "restore_callback_states_from_checkpoint"),
            *("enable_jit_checkpoint", "average_tokens_across_devices", "optim_args"),
            *("optim_target_modules", "torch_empty_cache_steps", "num_completions_to_print"),
            *("use_transformers_*", "transformers_continuous_batching_config"),
            *("attn_implementation", "dtype", "torch_dtype", "dataset_*", "model_revision"),
            *("lora_task_type", "use_rslora", "use_dora", "bnb_4bit_*", "use_bnb_nested_quant"),
        )
    ),
)
