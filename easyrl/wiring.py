"""Builds the parts of a run from the configuration. The only place where the rooms meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from easyrl.agreement import Agreement
from easyrl.canary import Canary, canary_prompts
from easyrl.checkpoint import Checkpoints
from easyrl.config import Config, ConfigError, DatasetConfig, EvaluationConfig
from easyrl.dataloaders.packing import batch_denominator, dummy_micro_batch, pack_groups
from easyrl.dataloaders.prompts import PromptBatches, PromptDataset, load_prompts
from easyrl.engines.deepspeed import DeepSpeedEngine
from easyrl.evaluation import Evaluator
from easyrl.inference import Inference, open_inference
from easyrl.inference_client.pool import Endpoint
from easyrl.objectives.advantages import group_advantages
from easyrl.rewards.startup import check_rewards
from easyrl.run_folder import (
    next_attempt,
    open_event_log,
    open_trackers,
    prepare_output,
    refuse_earlier_run,
    run_identity,
)
from easyrl.schema import MicroBatch, PolicyVersion, Prompt, RolloutGroup
from easyrl.seeding import sample_seed
from easyrl.throughput import Throughput
from easyrl.trainer import AfterReport, Hook, Progress, Trainer
from easyrl.weight_sync import WeightSync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_CANARY_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}  # mean |Δ log-prob|; bf16 noise is 3e-3


@dataclass
class Parts:
    """What a caller needs after building."""

    trainer: Trainer
    engine: DeepSpeedEngine


def build_parts(config: Config, opened: ExitStack, *, resume: bool) -> Parts:
    """Data first, then the model, then the endpoints: what fails cheaply fails first.

    ``opened`` closes what was opened, in reverse order.
    """
    if not resume:
        refuse_earlier_run(config)
    check_rewards(config.rewards)
    tokenizer = load_tokenizer(config)
    prompts = load_data(config.data, tokenizer, "data")
    held_out = load_held_out(config.evaluation, tokenizer)
    batches = PromptBatches(
        prompts,
        config.trainer.batch_size,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        epochs=config.data.epochs,
    )
    total_steps = min(batches.num_batches, config.trainer.max_steps or batches.num_batches)

    engine = DeepSpeedEngine(config, total_steps=total_steps)
    agreement = Agreement(engine.dp_rank, engine.dp_size)
    output = prepare_output(config, agreement)
    folder = output / "checkpoints"
    checkpoints = Checkpoints(folder, config.checkpoint.keep, engine, agreement)
    progress = _resume(checkpoints, batches) if resume else Progress()
    version = PolicyVersion(run_identity(config), next_attempt(output, agreement), 0)

    record = open_event_log(config, output, agreement, opened)
    inference = open_inference(config, opened, num_shares=engine.dp_size, record=record)
    check_context_lengths(config, inference, rollout=True)
    weight_sync = _weight_sync(config, engine, agreement, inference, prompts)
    opened.callback(weight_sync.close)
    inference.pool.set_repair(weight_sync.repair)

    after_publish: list[Hook] = []
    if config.evaluation is not None:
        evaluator = inference.evaluator(config.evaluation, held_out, config, agreement)
        after_publish.append(_evaluation_hook(config.evaluation, evaluator, total_steps))
    after_report: list[AfterReport] = []
    if config.checkpoint.every_steps:
        after_report.append(_checkpoint_hook(config, checkpoints, progress, batches))
    throughput = Throughput(inference.pool, engine.dp_size + len(inference.pool.endpoints))
    trackers = open_trackers(config, output, progress.step, total_steps) if engine.rank == 0 else []
    for tracker in trackers:
        opened.callback(tracker.close)

    trainer = Trainer(
        engine=engine,
        batches=batches,
        rollouts=inference.rollouts(config.rollout, config.rollout.num_generations, config),
        weight_sync=weight_sync,
        agreement=agreement,
        advantages=_advantages(config),
        pack=_pack(config, mask_truncated=config.rollout.truncated == "mask"),
        denominator=_denominator(config),
        dummy=dummy_micro_batch,
        record=record,
        after_publish=after_publish,
        after_report=after_report,
        on_step=[throughput.add, *(tracker.log for tracker in trackers)],
        version=version,
        max_tokens=config.trainer.max_tokens_per_micro_batch,
        synchronous=config.run.mode == "sync",
        max_steps=config.trainer.max_steps,
        max_bad_steps=config.trainer.max_bad_steps,
        progress=progress,
    )
    return Parts(trainer, engine)


# ---- data --------------------------------------------------------------------------------------


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of the policy, from disk."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.model.tokenizer_path, local_files_only=True)


def load_data(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, key: str) -> PromptDataset:
    """The prompts of one section. Raises ``ConfigError`` naming file, line and remedy."""
    try:
        return load_prompts(config, tokenizer, source_key=key)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def load_held_out(
    evaluation: EvaluationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> Sequence[Prompt]:
    """The evaluation's prompts; none without an evaluation."""
    if evaluation is None:
        return []
    return load_data(evaluation.data, tokenizer, "evaluation.data")


# ---- endpoints ----------------------------------------------------------------------------------


def _max_model_len(endpoint: Endpoint) -> int | None:
    """Prompt and response tokens together that ``endpoint`` serves, if it says so."""
    return None if endpoint.served is None else endpoint.served.max_model_len


def check_context_lengths(config: Config, inference: Inference, *, rollout: bool) -> None:
    """Raises ``ConfigError`` if a request could be longer than an endpoint serves."""
    needs: dict[str, int] = {}
    if rollout:
        key = "data.max_prompt_tokens + rollout.max_tokens"
        needs[key] = config.data.max_prompt_tokens + config.rollout.max_tokens
    if config.evaluation is not None:
        key = "evaluation.data.max_prompt_tokens + evaluation.sampling.max_tokens"
        evaluation = config.evaluation
        needs[key] = evaluation.data.max_prompt_tokens + evaluation.sampling.max_tokens
    for endpoint in inference.pool.endpoints:
        limit = _max_model_len(endpoint)
        for key, needed in needs.items():
            if limit is not None and needed > limit:
                raise ConfigError(
                    f"{key} is {needed}, but {endpoint.url} serves at most {limit} tokens; lower "
                    "one of them or raise the server's --max-model-len"
                )


def _weight_sync(
    config: Config,
    engine: DeepSpeedEngine,
    agreement: Agreement,
    inference: Inference,
    prompts: Sequence[Prompt],
) -> WeightSync:
    limits = [_max_model_len(endpoint) for endpoint in inference.pool.endpoints]
    known = [limit for limit in limits if limit is not None]
    try:
        asked = canary_prompts(prompts, min(known) if known else None)
    except ValueError as error:
        raise ConfigError(f"weight_sync.canary: {error}") from error
    canary = Canary(
        asked,
        config.rollout.temperature,
        _pack(config, mask_truncated=False),  # its responses all end at max_tokens
        config.weight_sync.timeout_s,
    )
    return WeightSync(
        config=config.weight_sync,
        tolerance=config.weight_sync.canary_tolerance
        or DEFAULT_CANARY_TOLERANCE[config.model.dtype],
        run_name=run_identity(config),
        startup_timeout_s=config.inference.startup_timeout_s,
        engine=engine,
        pool=inference.pool,
        thread=inference.thread,
        agreement=agreement,
        canary=canary,
        dummy=dummy_micro_batch,
    )


# ---- the objective's pure functions ------------------------------------------------------------


def _advantages(config: Config) -> Callable[[RolloutGroup], np.ndarray]:
    objective = config.objective

    def advantages(group: RolloutGroup) -> np.ndarray:
        rewards = group.rewards
        if objective.shuffle_rewards:
            key = sample_seed(config.run.seed, group.prompt.epoch, group.prompt.index, -1)
            rewards = np.random.default_rng(key).permutation(rewards)
        return group_advantages(rewards, objective.advantage)

    return advantages


def _pack(
    config: Config, *, mask_truncated: bool
) -> Callable[[Sequence[RolloutGroup], Sequence[np.ndarray]], list[MicroBatch]]:
    def pack(groups: Sequence[RolloutGroup], advantages: Sequence[np.ndarray]) -> list[MicroBatch]:
        return pack_groups(
            groups,
            advantages,
            aggregation=config.objective.aggregation,
            max_tokens=config.rollout.max_tokens,
            mask_truncated=mask_truncated,
            max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
        )

    return pack


def _denominator(config: Config) -> Callable[[Sequence[RolloutGroup]], float]:
    def denominator(groups: Sequence[RolloutGroup]) -> float:
        mask_truncated = config.rollout.truncated == "mask"
        return batch_denominator(groups, config.objective.aggregation, mask_truncated)

    return denominator


# ---- between batches ---------------------------------------------------------------------------


def _resume(checkpoints: Checkpoints, batches: PromptBatches) -> Progress:
    try:
        state = checkpoints.load_latest()
        if state is None:
            raise ValueError(
                f"{checkpoints.directory} holds no checkpoint; set "
                "checkpoint.every_steps before the next run, and leave --resume out to start a "
                "new one in another folder"
            )
        batches.restore(state["cursor"])
    except ValueError as error:  # other settings than those of the checkpoint
        raise ConfigError(f"--resume: {error}") from error
    return Progress(**state["progress"])


def _evaluation_hook(schedule: EvaluationConfig, evaluator: Evaluator, total_steps: int) -> Hook:
    def evaluate(step: int, version: PolicyVersion) -> dict[str, float]:
        due = bool(schedule.every_steps) and step > 0 and step % schedule.every_steps == 0
        due |= step == 0 and schedule.at_start
        due |= step == total_steps and schedule.at_end
        return evaluator.evaluate(str(version)) if due else {}

    return evaluate


def _checkpoint_hook(
    config: Config, checkpoints: Checkpoints, progress: Progress, batches: PromptBatches
) -> AfterReport:
    def save(step: int, _: PolicyVersion) -> None:
        if step % config.checkpoint.every_steps == 0:
            state = {"progress": asdict(progress), "cursor": batches.state()}
            checkpoints.save(step, state)

    return save
