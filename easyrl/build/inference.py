"""The producer's side of a run: fetchers, worker processes, the loop thread, the endpoints."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial

from easyrl.build.accumulation import is_interruption
from easyrl.build.episodes import EpisodeTurns, open_episodes
from easyrl.build.servers import StartedServers, max_num_seqs
from easyrl.completion_check import Vocabulary
from easyrl.config import (
    Config,
    ConfigError,
    EvaluationConfig,
    InferenceConfig,
    SamplingConfig,
)
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator, Sample
from easyrl.episodes.player import EpisodeFailed, EpisodePlayer, OnTurn, ignore_turn
from easyrl.episodes.scorer import EpisodeScorer
from easyrl.episodes.times import environment_metrics
from easyrl.inference_client.adapter_names import AdapterNames
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.errors import (
    EndpointError,
    NoEndpointError,
    PromptRejected,
    PromptTooLong,
)
from easyrl.inference_client.fetching.fetcher_pool import FetcherPool
from easyrl.inference_client.pool.adaptive_limit import Choice
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.inference_client.pool.group_assignment import ExpectedLengths
from easyrl.inference_client.pool.idle_room import IdleRoom
from easyrl.inference_client.pool.inflight_limits import MOST
from easyrl.metrics.event_log import Record, ignore
from easyrl.rewards import worker as reward_worker
from easyrl.rewards.scorer import Scorer
from easyrl.runtime.busy_time import BusyTime
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.determinism import is_strict
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.seeding import sample_seed
from easyrl.runtime.stopping import StopRequest
from easyrl.runtime.workers.worker_pool import WorkerPool
from easyrl.schema import Completion, JournalledTurn, Prompt
from easyrl.timeline.spans import AddSpan, ignore_span
from easyrl.trainer.evaluation import Evaluator
from easyrl.trainer.held_out_set import HeldOutSet

LAST = sys.maxsize  # priority of groups that all of training go before


@dataclass
class Inference:
    """The producer's thread, its processes and the endpoints."""

    config: Config
    thread: LoopThread
    workers: WorkerPool
    pool: EndpointPool
    api_keys: ApiKeys
    record: Record
    num_shares: int = 1  # ranks that share the endpoints, and each batch
    rewards_busy: BusyTime = field(default_factory=BusyTime)  # of training, not of evaluations
    span: AddSpan = ignore_span  # told what the producers that are made from then on do
    episodes: EpisodePlayer | None = None  # None: a sample is one response
    # keeps a turn of an episode that is to be trained, by the version that the batch asks for
    keep_turn: Callable[[str | None, JournalledTurn], object] | None = None

    @property
    def in_outage(self) -> bool:
        """Whether an endpoint, or what an environment connects to, is waited for."""
        return self.pool.in_outage or (self.episodes is not None and self.episodes.outages.any)

    def episode_metrics(self, collectives: Collectives) -> dict[str, float]:
        """Of the episodes to be trained that have ended since the last call, and of the
        environments' hosts. Collective."""
        if self.episodes is None:
            return {}
        return environment_metrics(collectives.all_gather(self.episodes.taken()))

    def _held_out_metrics(self, collectives: Collectives) -> dict[str, float]:
        """As ``episode_metrics``, of held-out prompts. Collective."""
        if self.episodes is None:
            return {}
        taken = self.episodes.held_out_times.taken()
        return environment_metrics(collectives.all_gather(taken), "held_out/")

    def rollouts(self) -> RolloutGenerator:
        """A producer of training groups."""
        rollout = self.config.rollout
        return self._generator(
            rollout,
            rollout.num_generations,
            self.config.scoring.truncated_reward,
            self.record,
            groups_per_batch=self.config.trainer.batch_size // self.num_shares,
            busy=self.rewards_busy,
            in_prompt_order=is_strict(self.config),
            on_begin=self.pool.limits.begin_batch,
        )

    def evaluator(
        self,
        evaluation: EvaluationConfig,
        held_out: Mapping[str, Sequence[Prompt]],
        collectives: Collectives,
        stop: StopRequest,
        record: Record = ignore,
        room: IdleRoom | None = None,
    ) -> Evaluator:
        """Evaluates on the ``held_out`` prompts of each set with the same rewards, or as episodes
        of the same environments; its events are not the run's own.

        ``room``: in which its requests stay, and its scores behind all others; default: nobody else
        is there.
        """
        reward_name = self.config.rewards[0].label if self.episodes is None else None
        sets = [
            HeldOutSet(
                name,
                config,
                held_out[name],
                self._generator(
                    config.sampling,
                    config.num_samples,
                    None,
                    record,
                    groups_per_batch=len(held_out[name]) // self.num_shares,
                    busy=BusyTime(),
                    room=room,
                ),
                reward_name=reward_name,
                max_excluded=self.config.data.max_excluded,
            )
            for name, config in evaluation.sets.items()
        ]
        return Evaluator(
            evaluation,
            sets,
            is_interruption,
            collectives,
            stop,
            known=lambda: self._held_out_metrics(collectives),
        )

    def _generator(
        self,
        sampling: SamplingConfig,
        num_generations: int,
        truncated_reward: float | None,
        record: Record,
        *,
        groups_per_batch: int,
        busy: BusyTime,
        in_prompt_order: bool = False,
        room: IdleRoom | None = None,
        on_begin: Callable[[int], object] = lambda num_recovered: None,
    ) -> RolloutGenerator:
        config, lengths = self.config, ExpectedLengths(sampling.max_tokens)
        is_of_batch = room is None

        @asynccontextmanager
        async def begin_group(
            prompt: Prompt, version: str | None, priority: int
        ) -> AsyncIterator[Sample]:
            async with AsyncExitStack() as held:
                leave = None
                if room is not None:
                    leave = await held.enter_async_context(room.places(num_generations))
                expected, own = lengths.of(prompt.index), priority if room is None else LAST
                members, num_beginning = None, num_generations
                rank = self.pool.rank(own, expected)
                if self.episodes is not None:
                    members = await held.enter_async_context(
                        self.episodes.group(prompt, num_generations, rank)
                    )
                    num_beginning = members.num_held
                place = await held.enter_async_context(
                    self.pool.group(
                        len(prompt.token_ids),
                        expected,
                        version,
                        num_samples=num_beginning,
                        sampling=sampling,
                        is_of_batch=is_of_batch,
                        rank=rank,
                    )
                )

                on_turn: OnTurn = ignore_turn
                if is_of_batch and self.keep_turn is not None:
                    on_turn = partial(self.keep_turn, version)

                async def sample(number: int) -> Completion:
                    seed = sample_seed(config.run.seed, prompt.epoch, prompt.index, number)
                    if self.episodes is None or members is None:
                        made = await self.pool.generate(prompt.token_ids, sampling, seed, place)
                    else:
                        async with members.place():
                            with closing(EpisodeTurns(self.pool, place)) as turns:
                                made = await self.episodes.play(
                                    prompt,
                                    number,
                                    sampling,
                                    seed,
                                    turns,
                                    on_turn,
                                    turns.put_off,
                                    turns.lend_place,
                                )
                    if made.episode is None or made.episode.failure is None:
                        lengths.saw(prompt.index, len(made.token_ids))
                    if leave is not None:
                        leave()
                    return made

                yield sample

        scorer = Scorer(
            config.rewards,
            config.scoring,
            self.workers,
            truncated_reward=truncated_reward,
            last=room is not None,
            groups_per_batch=max(groups_per_batch, 1),
            num_generations=num_generations,
            busy=busy,
        )
        of_episodes = EpisodeScorer(
            truncated_reward,
            on_failure={each.name: each.on_failure for each in config.environments},
            groups_per_batch=max(groups_per_batch, 1),
            num_generations=num_generations,
        )
        return RolloutGenerator(
            self.thread,
            begin_group,
            scorer if self.episodes is None else of_episodes,
            num_generations=num_generations,
            queue_size=config.rollout.queue_size,
            excluded_by={
                PromptTooLong: "too_long",
                PromptRejected: "refused",
                EpisodeFailed: "refused",
            },
            in_prompt_order=in_prompt_order,
            record=record,
            span=self.span if room is None else ignore_span,
            on_begin=on_begin,
        )


@dataclass(frozen=True)
class Scoring:
    """The producer's thread, and the worker processes in which rewards are called."""

    thread: LoopThread
    workers: WorkerPool


def open_scoring(config: Config, opened: ExitStack) -> Scoring:
    """Starts both; the workers import what they need meanwhile."""
    thread = opened.enter_context(LoopThread())
    workers = WorkerPool(
        config.scoring.num_workers,
        initializer=reward_worker.initialize,
        initargs=(config.rewards, config.model.tokenizer_path),
    )
    thread.run(workers.start())
    opened.callback(lambda: thread.run(workers.close()))
    return Scoring(thread, workers)


def open_inference(
    config: Config,
    opened: ExitStack,
    scoring: Scoring,
    *,
    vocabulary: Vocabulary,
    servers: StartedServers | None = None,
    num_shares: int = 1,
    record: Record = ignore,
) -> Inference:
    """Starts fetchers and waits for an endpoint.

    Args:
        scoring: its thread is the producer's.
        vocabulary: of the policy; another token id, or end of a response, is its endpoint's fault.
        servers: default: those of the configuration that somebody else runs.
        num_shares: ranks that share them.
    """
    thread, workers = scoring.thread, scoring.workers
    servers = servers or StartedServers(config.inference.urls, {})
    api_keys = ApiKeys.read(config.inference)
    for url, key in servers.api_keys.items():
        api_keys.learn(url, key)
    adapters = AdapterNames()
    fetchers = FetcherPool(
        config.inference.num_fetchers,
        api_keys,
        vocabulary=vocabulary,
        adapters=adapters,
        is_awaited=bool(config.environments),
    )
    thread.run(fetchers.start())
    opened.callback(lambda: thread.run(fetchers.close()))
    pool = EndpointPool(
        inference_settings(config),
        fetchers,
        streamed=fetchers.streamed,
        urls=servers.urls,
        api_keys=api_keys,
        num_shares=num_shares,
        update_timeout_s=config.weight_sync.timeout_s,
        adapters=adapters,
    )
    if config.inference.launch is not None and (most := max_num_seqs(config.inference.launch)):
        pool.limits.launched_with = dict.fromkeys(servers.api_keys, most)  # on every rank
    pool.limits.on_choice = partial(_record_choice, record)
    thread.run(pool.start())
    opened.callback(lambda: thread.run(pool.close()))
    try:
        thread.run(pool.wait_until_healthy(own=servers.api_keys, given_up=servers.given_up))
    except (NoEndpointError, EndpointError) as error:
        if ends := servers.last_ends():
            listed = "".join(f"\n  {end}" for end in ends)
            raise ConfigError(
                f"inference.launch: {error}{listed}\n(correct its options)"
            ) from error
        raise ConfigError(
            f"inference.endpoints: {error}\n(start the servers, or correct their URLs; raise "
            "inference.startup_timeout_s for servers that take longer)"
        ) from error
    episodes = open_episodes(config, opened, thread, pool, vocabulary, record, num_shares)
    return Inference(config, thread, workers, pool, api_keys, record, num_shares, episodes=episodes)


def inference_settings(config: Config) -> InferenceConfig:
    """Those of the pool: in strict mode nothing of them follows what is measured."""
    settings = config.inference
    if settings.max_inflight == "auto" and is_strict(config):
        return settings.model_copy(update={"max_inflight": MOST})
    return settings


def _record_choice(record: Record, endpoint: Endpoint, choice: Choice) -> None:
    record("max_inflight_chosen", endpoint=endpoint.url, max_inflight=choice.max_inflight)
