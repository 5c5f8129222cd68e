"""Builds the parts of a run from the configuration. The only place where the rooms meet."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from easyrl.agreement import Agreement
from easyrl.canary import Canary, canary_prompts
from easyrl.checkpoint import Checkpoints
from easyrl.config import (
    Config,
    ConfigError,
    DatasetConfig,
    EvaluationConfig,
    SamplingConfig,
    dump_config,
)
from easyrl.console import ConsoleView
from easyrl.dataloaders.loop_thread import LoopThread
from easyrl.dataloaders.packing import batch_denominator, dummy_micro_batch, pack_groups
from easyrl.dataloaders.prompts import PromptBatches, PromptDataset, load_prompts
from easyrl.dataloaders.rollout_generator import RolloutGenerator
from easyrl.engines.deepspeed import DeepSpeedEngine
from easyrl.evaluation import Evaluator
from easyrl.event_log import EventLog, Record, ignore
from easyrl.inference_client.errors import NoEndpointError, RequestRejected
from easyrl.inference_client.pool import Endpoint, EndpointPool
from easyrl.metrics import JsonlTracker, TensorBoardTracker, Tracker, WandbTracker
from easyrl.objectives.advantages import group_advantages
from easyrl.rewards import worker as reward_worker
from easyrl.rewards.scorer import Scorer
from easyrl.rewards.startup import check_rewards
from easyrl.schema import Completion, MicroBatch, PolicyVersion, Prompt, RolloutGroup
from easyrl.seeding import sample_seed
from easyrl.throughput import Throughput
from easyrl.trainer import Hook, Progress, Trainer
from easyrl.weight_sync import WeightSync
from easyrl.worker_pool import WorkerPool

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
    output = _prepare_output(config, agreement)
    folder = output / "checkpoints"
    checkpoints = Checkpoints(folder, config.checkpoint.keep, engine, agreement)
    progress = _resume(checkpoints, batches) if resume else Progress()
    version = PolicyVersion(config.run.name, _next_attempt(output, agreement), 0)

    record = _open_event_log(config, output, agreement, opened)
    inference = open_inference(config, opened, num_shares=engine.dp_size, record=record)
    _check_context_length(config, inference)
    weight_sync = _weight_sync(config, engine, agreement, inference, prompts)
    opened.callback(weight_sync.close)

    after_publish: list[Hook] = []
    if config.evaluation is not None:
        evaluator = inference.evaluator(config.evaluation, held_out, config, agreement)
        after_publish.append(_evaluation_hook(config.evaluation, evaluator, total_steps))
    if config.checkpoint.every_steps:
        after_publish.append(_checkpoint_hook(config, checkpoints, progress, batches))
    throughput = Throughput(inference.pool, engine.dp_size + len(inference.pool.endpoints))
    trackers = _trackers(config, output, progress.step, total_steps) if engine.rank == 0 else []
    for tracker in trackers:
        opened.callback(tracker.close)

    trainer = Trainer(
        engine=engine,
        batches=batches,
        rollouts=inference.rollouts(config.rollout, config.rollout.num_generations, config),
        weight_sync=weight_sync,
        agreement=agreement,
        advantages=_advantages(config),
        pack=_pack(config),
        denominator=_denominator(config),
        dummy=dummy_micro_batch,
        record=record,
        after_publish=after_publish,
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


# ---- inference ---------------------------------------------------------------------------------


@dataclass
class Inference:
    """The producer's thread, its worker processes and the endpoints."""

    thread: LoopThread
    workers: WorkerPool
    pool: EndpointPool
    record: Record

    def rollouts(
        self, sampling: SamplingConfig, num_generations: int, config: Config
    ) -> RolloutGenerator:
        """A producer of training groups."""
        scorer = self._scorer(config, truncated=config.rollout.truncated)
        return self._generator(sampling, num_generations, config, scorer, self.record)

    def evaluator(
        self,
        evaluation: EvaluationConfig,
        prompts: Sequence[Prompt],
        config: Config,
        agreement: Agreement,
    ) -> Evaluator:
        """Evaluates on ``prompts`` with the same rewards."""
        scorer = self._scorer(config, truncated="keep")
        generator = self._generator(
            evaluation.sampling, evaluation.num_samples, config, scorer, ignore
        )
        return Evaluator(
            prompts=prompts,
            rollouts=generator,
            agreement=agreement,
            num_samples=evaluation.num_samples,
            pass_at=evaluation.pass_at,
            threshold=evaluation.threshold,
            reward_name=config.rewards[0].label,
        )

    def _scorer(self, config: Config, truncated: Literal["keep", "mark", "mask"]) -> Scorer:
        return Scorer(
            config.rewards,
            config.scoring,
            self.workers,
            truncated=truncated,
            truncated_reward=config.rollout.truncated_reward,
        )

    def _generator(
        self,
        sampling: SamplingConfig,
        num_generations: int,
        config: Config,
        scorer: Scorer,
        record: Record,
    ) -> RolloutGenerator:
        async def generate(prompt: Prompt, sample: int, version: str | None) -> Completion:
            seed = sample_seed(config.run.seed, prompt.epoch, prompt.index, sample)
            return await self.pool.generate(prompt.token_ids, sampling, seed, version)

        return RolloutGenerator(
            self.thread,
            generate,
            scorer,
            num_generations=num_generations,
            queue_size=config.rollout.queue_size,
            record=record,
        )


def open_inference(
    config: Config, opened: ExitStack, *, num_shares: int = 1, record: Record = ignore
) -> Inference:
    """Starts worker processes and the producer's thread, and waits for the endpoints."""
    workers = WorkerPool(
        config.scoring.num_workers,
        initializer=reward_worker.initialize,
        initargs=(config.rewards, config.model.tokenizer_path),
    )
    opened.callback(workers.close)
    thread = opened.enter_context(LoopThread())
    pool = EndpointPool(config.inference, workers.call, num_shares=num_shares)
    thread.run(pool.start())
    opened.callback(lambda: thread.run(pool.close()))
    try:
        thread.run(pool.wait_until_healthy())
    except (NoEndpointError, RequestRejected) as error:
        raise ConfigError(f"inference.endpoints: {error}") from error
    return Inference(thread, workers, pool, record)


def _max_model_len(endpoint: Endpoint) -> int | None:
    """Prompt and response tokens together that ``endpoint`` serves, if it says so."""
    return None if endpoint.served is None else endpoint.served.max_model_len


def _check_context_length(config: Config, inference: Inference) -> None:
    needed = config.data.max_prompt_tokens + config.rollout.max_tokens
    for endpoint in inference.pool.endpoints:
        limit = _max_model_len(endpoint)
        if limit is not None and needed > limit:
            raise ConfigError(
                f"data.max_prompt_tokens + rollout.max_tokens is {needed}, but {endpoint.url} "
                f"serves at most {limit} tokens; lower one or raise the server's --max-model-len"
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
    canary = Canary(
        canary_prompts(prompts, min(known) if known else None),
        config.rollout.temperature,
        _pack(config),
        config.weight_sync.timeout_s,
    )
    return WeightSync(
        config=config.weight_sync,
        tolerance=config.weight_sync.canary_tolerance
        or DEFAULT_CANARY_TOLERANCE[config.model.dtype],
        run_name=config.run.name,
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
    config: Config,
) -> Callable[[Sequence[RolloutGroup], Sequence[np.ndarray]], list[MicroBatch]]:
    def pack(groups: Sequence[RolloutGroup], advantages: Sequence[np.ndarray]) -> list[MicroBatch]:
        return pack_groups(
            groups,
            advantages,
            aggregation=config.objective.aggregation,
            max_tokens=config.rollout.max_tokens,
            mask_truncated=config.rollout.truncated == "mask",
            max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
        )

    return pack


def _denominator(config: Config) -> Callable[[Sequence[RolloutGroup]], float]:
    def denominator(groups: Sequence[RolloutGroup]) -> float:
        mask_truncated = config.rollout.truncated == "mask"
        return batch_denominator(groups, config.objective.aggregation, mask_truncated)

    return denominator


# ---- the run's folder --------------------------------------------------------------------------


def _prepare_output(config: Config, agreement: Agreement) -> Path:
    output = config.run.output_dir
    if agreement.rank == 0:
        output.mkdir(parents=True, exist_ok=True)
        (output / "config.yaml").write_text(dump_config(config))
    agreement.exchange(None)  # nobody writes before the folder is there
    return output


def _next_attempt(output: Path, agreement: Agreement) -> int:
    """How often the run was started; part of the policy version, so that no two lives share one."""
    file = output / "attempt.json"
    attempt = 0
    if agreement.rank == 0:
        attempt = json.loads(file.read_text()) + 1 if file.exists() else 0
        file.write_text(json.dumps(attempt))
    return agreement.from_rank_zero(attempt)


def _resume(checkpoints: Checkpoints, batches: PromptBatches) -> Progress:
    state = checkpoints.load_latest()
    if state is None:
        return Progress()
    batches.restore(state["cursor"])
    return Progress(**state["progress"])


def _open_event_log(
    config: Config, output: Path, agreement: Agreement, opened: ExitStack
) -> Record:
    if not config.run.event_log:
        return ignore
    log = EventLog(output / f"events-rank{agreement.rank}.jsonl")
    opened.callback(log.close)
    return log.record


def _trackers(config: Config, output: Path, from_step: int, total_steps: int) -> list[Tracker]:
    trackers: list[Tracker] = [JsonlTracker(output / "metrics.jsonl", from_step)]
    if "tensorboard" in config.run.trackers:
        trackers.append(TensorBoardTracker(output / "tensorboard", from_step))
    if "wandb" in config.run.trackers:
        plain = config.model_dump(mode="json")
        trackers.append(WandbTracker(config.run.wandb_project, config.run.name, output, plain))
    if config.run.console:
        trackers.append(ConsoleView(total_steps))
    return trackers


# ---- between batches ---------------------------------------------------------------------------


def _evaluation_hook(schedule: EvaluationConfig, evaluator: Evaluator, total_steps: int) -> Hook:
    def evaluate(step: int, version: PolicyVersion) -> dict[str, float]:
        due = bool(schedule.every_steps) and step > 0 and step % schedule.every_steps == 0
        due |= step == 0 and schedule.at_start
        due |= step == total_steps and schedule.at_end
        return evaluator.evaluate(str(version)) if due else {}

    return evaluate


def _checkpoint_hook(
    config: Config, checkpoints: Checkpoints, progress: Progress, batches: PromptBatches
) -> Hook:
    resumed_at = progress.step

    def save(step: int, _: PolicyVersion) -> dict[str, float]:
        if step > resumed_at and step % config.checkpoint.every_steps == 0:
            state = {"progress": asdict(progress), "cursor": batches.state()}
            checkpoints.save(step, state)
        return {}

    return save
