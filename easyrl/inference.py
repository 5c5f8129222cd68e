"""The producer's side of a run: worker processes, the loop thread, the endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from easyrl.agreement import Agreement
from easyrl.config import Config, ConfigError, EvaluationConfig, SamplingConfig
from easyrl.dataloaders.loop_thread import LoopThread
from easyrl.dataloaders.rollout_generator import RolloutGenerator
from easyrl.evaluation import Evaluator
from easyrl.event_log import Record, ignore
from easyrl.inference_client.errors import NoEndpointError, RequestRejected
from easyrl.inference_client.pool import EndpointPool
from easyrl.rewards import worker as reward_worker
from easyrl.rewards.scorer import Scorer
from easyrl.schema import Completion, Prompt
from easyrl.seeding import sample_seed
from easyrl.worker_pool import WorkerPool


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
    pool = EndpointPool(
        config.inference,
        workers.call,
        num_shares=num_shares,
        update_timeout_s=config.weight_sync.timeout_s,
    )
    thread.run(pool.start())
    opened.callback(lambda: thread.run(pool.close()))
    try:
        thread.run(pool.wait_until_healthy())
    except (NoEndpointError, RequestRejected) as error:
        raise ConfigError(f"inference.endpoints: {error}") from error
    return Inference(thread, workers, pool, record)
