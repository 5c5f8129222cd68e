"""What an idle trainer gains by looking ahead: sync, async and async with look-ahead in turn.

``python -m benchmarks.look_ahead [--repeats 5] [--frozen-models 1] [--slots 256]``

Real training of a small model with a frozen reference on one core: open samples, packing, forward
and backward, the optimizer step. With ``--frozen-models 2`` there is a lagged old policy, too: as
much again that can be computed ahead. Generation is played, as if on devices of its own: each
response occupies one of the slots for as long as its tokens take, its length log-normal as those of
reasoning models are. The seconds per token are chosen so that the whole generation of a batch takes
as long as its whole training, or half of that (``--generation-over-training 0.5 1``), which is
measured before each repeat. Where generation is the shorter, the trainer waits for little and what
it looks ahead at must pay all the same. Every mode gets the same responses at the same times.

Time is the trainer's own: it passes as the trainer's thread computes (its processor time, so that
what else the machine does counts for nothing) and jumps to the next response where the trainer
waits. ``async_over_sync`` is sync's time over async's for a whole batch, without weight sync; 2 is
what no schedule can beat with equal times. Medians over repeats whose modes take turns. The last
line printed is one JSON object, with figures for each ratio.
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.parts.random_model import write_prompts, write_random_model
from easyrl.build.accumulation import rows_per_drain
from easyrl.build.recipe import group_functions
from easyrl.config import Config
from easyrl.config.file import validate_config
from easyrl.dataloaders.producer.group_stream import packed_tokens
from easyrl.dataloaders.producer.open_samples import OpenSamples
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.metrics.batch_metrics import BatchTotals
from easyrl.metrics.event_log import ignore
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import Completion, FinishedSamples, Key, Prompt, RolloutGroup, Score, VersionSpan
from easyrl.trainer.accumulation import Accumulator

MODES = ("sync", "async", "async_with_look_ahead")
VERSION = "run:0:0"


@dataclass(frozen=True)
class Workload:
    """Sizes of a batch and of the model."""

    num_prompts: int = 32
    num_generations: int = 8
    prompt_tokens: int = 32
    median_tokens: int = 48
    sigma: float = 1.0  # of the logarithm of a length
    max_tokens: int = 400
    slots: int = 256  # all at once
    max_tokens_per_micro_batch: int = 2048
    frozen_models: int = 1  # the reference; 2: and a lagged old policy
    hidden_size: int = 128
    num_layers: int = 3
    vocab_size: int = 2048


class Return(NamedTuple):
    """A response is there."""

    moment: float  # seconds from the first request
    index: int  # of its prompt
    sample: int


@dataclass(frozen=True)
class Batch:
    """The responses of a batch, and how long a token of theirs takes."""

    prompts: list[Prompt]
    completions: list[list[Completion]]
    seconds_per_token: float = 1.0

    def returns(self, slots: int) -> deque[Return]:
        """When each response is there, in this order."""
        free_at = [0.0] * slots
        found = []
        for index, group in enumerate(self.completions):
            for sample, completion in enumerate(group):
                seconds = len(completion.token_ids) * self.seconds_per_token
                found.append(Return(heapq.heappop(free_at) + seconds, index, sample))
                heapq.heappush(free_at, found[-1].moment)
        return deque(sorted(found))


@dataclass(frozen=True)
class Measured:
    """One batch in one mode; seconds."""

    seconds: float
    wait_s: float
    idle_work_s: float
    totals: BatchTotals
    grad_norm: float


def main() -> None:
    arguments = _parse()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)  # all of the work is this thread's
    work = Workload(
        num_prompts=arguments.prompts,
        num_generations=arguments.generations,
        slots=arguments.slots,
        frozen_models=arguments.frozen_models,
    )
    folder = Path(tempfile.mkdtemp(prefix="easyrl-look-ahead-"))
    try:
        trainer = Trainer(folder, work)
        rows = {
            f"generation_over_training_{ratio:g}": measure(trainer, work, arguments.repeats, ratio)
            for ratio in arguments.generation_over_training
        }
    finally:
        shutil.rmtree(folder)
    print(json.dumps({ratio: {n: _median(own, n) for n in own[0]} for ratio, own in rows.items()}))


def measure(
    trainer: Trainer, work: Workload, repeats: int, generation_over_training: float
) -> list[dict[str, float]]:
    trainer.run(random_batch(work, seed=0), "sync")  # warms everything up
    rows = []
    for repeat in range(repeats):
        batch = random_batch(work, seed=1 + repeat)
        training_s = trainer.run(replace(batch, seconds_per_token=0.0), "sync").seconds
        generation_s = generation_over_training * training_s
        whole = batch.returns(work.slots)[-1].moment  # at a second per token
        batch = replace(batch, seconds_per_token=generation_s / whole)
        order = [*MODES[repeat % 3 :], *MODES[: repeat % 3]]
        rows.append(_row({mode: trainer.run(batch, mode) for mode in order}))
        rows[-1] |= {"training_s": training_s, "generation_s": generation_s}
        print("  ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()), flush=True)
    return rows


def random_batch(work: Workload, seed: int) -> Batch:
    """Random tokens; what is in them does not matter to the time they take."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(1, work.vocab_size, count, dtype=np.int32)

    def completion() -> Completion:
        length = int(np.clip(work.median_tokens * rng.lognormal(0, work.sigma), 4, work.max_tokens))
        return Completion(
            token_ids=tokens(length),
            logprobs=np.full(length, -1.0, np.float32),
            finish_reason="stop",
            version_spans=(VersionSpan(VERSION, 0, length),),
            endpoint="http://played",
            loss_mask=np.ones(length, dtype=bool),
        )

    indices = range(work.num_prompts)
    return Batch(
        [Prompt(index, tokens(work.prompt_tokens), "", None) for index in indices],
        [[completion() for _ in range(work.num_generations)] for _ in indices],
    )


class WorkClock:
    """Seconds in which this thread computed or waited."""

    def __init__(self) -> None:
        self._skipped = -time.thread_time()

    @property
    def now(self) -> float:
        return time.thread_time() + self._skipped

    def wait_until(self, moment: float) -> float:
        """Returns how long that was."""
        waited = max(0.0, moment - self.now)
        self._skipped += waited
        return waited


class PlayedStream:
    """A ``GroupSource`` whose responses return at times known before, on the consumer's clock.

    They take places in the order of their prompts, as soon as one is free.
    """

    first_group_wait_s = load_s = 0.0
    accepted_versions = frozenset({VERSION})
    recovered: frozenset[Key] = frozenset()

    def __init__(self, batch: Batch, slots: int, clock: WorkClock) -> None:
        self._batch = batch
        self._clock = clock
        self._returns = batch.returns(slots)  # the next one first
        self._missing = [len(group) for group in batch.completions]
        self._ready: deque[RolloutGroup] = deque()
        self.open_samples = OpenSamples(len(batch.completions[0]))
        self.wait_s = 0.0
        self.idle_work_s = 0.0

    def note_trained(self, num_tokens: int) -> None: ...

    def drain_ready(
        self, max_tokens: int, idle: Callable[[], bool] | None = None
    ) -> list[RolloutGroup]:
        self._receive()
        while not self._ready and self._returns:
            if idle is None or not self._works(idle):
                self._wait()
            self._receive()
        groups: list[RolloutGroup] = []
        while self._ready:
            max_tokens -= packed_tokens(self._ready[0])
            if groups and max_tokens < 0:
                break
            groups.append(self._ready.popleft())
        return groups

    def note_ahead(self, piece: Sequence[FinishedSamples]) -> None: ...
    def ahead_of_drain(self, max_tokens: int) -> Sequence[Sequence[FinishedSamples]]:
        return ()

    def complete(self) -> None:
        while self._returns:
            self._wait()
            self._receive()

    def interrupt(self, error: BaseException) -> None: ...
    def close(self) -> None: ...

    def _works(self, idle: Callable[[], bool]) -> bool:
        start = self._clock.now
        worked = idle()
        self.idle_work_s += self._clock.now - start
        return worked

    def _wait(self) -> None:
        self.wait_s += self._clock.wait_until(self._returns[0].moment)

    def _receive(self) -> None:
        """What has returned by now."""
        while self._returns and self._returns[0].moment <= self._clock.now:
            _, index, sample = self._returns.popleft()
            prompt, completions = self._batch.prompts[index], self._batch.completions[index]
            self.open_samples.add(prompt, sample, completions[sample])
            self._missing[index] -= 1
            if not self._missing[index]:
                self.open_samples.close_group(prompt)
                scores = tuple(Score(float(c.token_ids[0] % 2), {}) for c in completions)
                self._ready.append(
                    RolloutGroup(prompt, tuple(completions), scores, VERSION, 0.0, 0.0)
                )


class Trainer:
    """An engine with a reference, and what drives it through a batch."""

    def __init__(self, folder: Path, work: Workload) -> None:
        self._work = work
        config = _configuration(folder, work)
        self._engine = DeepSpeedEngine(config, total_steps=1000)
        self._accumulator = Accumulator(
            engine=self._engine,
            collectives=Collectives(Ranks.data_parallel(0, 1)),
            functions=group_functions(config),
            stop=StopRequest(grace_s=60.0),
            is_interruption=lambda error: False,
            record=ignore,
            max_tokens=work.max_tokens_per_micro_batch,
            rows_per_drain=rows_per_drain(config),
            synchronous=False,
        )

    def run(self, batch: Batch, mode: str) -> Measured:
        """One batch, from the first request to the end of the optimizer step."""
        accumulator = replace(
            self._accumulator,
            synchronous=mode == "sync",
            look_ahead=mode == "async_with_look_ahead",
        )
        clock = WorkClock()
        stream = PlayedStream(batch, self._work.slots, clock)
        self._engine.begin_batch()
        totals = accumulator.accumulate(stream)
        step = self._engine.optimizer_step(totals.denominator)
        return Measured(clock.now, stream.wait_s, stream.idle_work_s, totals, step.grad_norm)


def _configuration(folder: Path, work: Workload) -> Config:
    model = write_random_model(
        folder / "model",
        hidden_size=work.hidden_size,
        num_layers=work.num_layers,
        vocab_size=work.vocab_size,
    )
    settings: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"files": [str(write_prompts(folder / "prompts.jsonl", 1, 4))]},
        "inference": {"endpoints": ["http://127.0.0.1:1"]},
        "rewards": [{"name": "exact"}],
        "rollout": {
            "num_generations": work.num_generations,
            "max_tokens": work.max_tokens,
        },
        "recipe": {"aggregation": "token", "kl_coef": 0.01},
        "trainer": {
            "zero_stage": 0,
            "old_policy": "lagged" if work.frozen_models == 2 else "auto",
            "batch_size": work.num_prompts,
            "learning_rate": 1e-9,  # repeats train the same policy
            "max_tokens_per_micro_batch": work.max_tokens_per_micro_batch,
        },
    }
    return validate_config(settings)


def _row(measured: dict[str, Measured]) -> dict[str, float]:
    sync, plain, ahead = (measured[mode] for mode in MODES)
    tokens = ahead.totals.metrics.sums["num_loss_tokens"]
    return {
        "async_over_sync": sync.seconds / plain.seconds,
        "async_over_sync_with_look_ahead": sync.seconds / ahead.seconds,
        "gain": sync.seconds / ahead.seconds - sync.seconds / plain.seconds,
        "async_wait_s": plain.wait_s,
        "look_ahead_wait_s": ahead.wait_s,
        "look_ahead_s": ahead.idle_work_s,
        "tokens_ahead": ahead.totals.num_look_ahead_tokens / tokens,
        "grad_norm_difference": abs(ahead.grad_norm / sync.grad_norm - 1),
    }


def _median(rows: Sequence[dict[str, float]], name: str) -> float:
    value = statistics.median(row[name] for row in rows)
    return float(f"{value:.2g}") if name == "grad_norm_difference" else round(value, 3)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--generation-over-training", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--prompts", type=int, default=Workload.num_prompts)
    parser.add_argument("--generations", type=int, default=Workload.num_generations)
    parser.add_argument("--slots", type=int, default=Workload.slots)
    parser.add_argument("--frozen-models", type=int, choices=(1, 2), default=Workload.frozen_models)
    return parser.parse_args()


if __name__ == "__main__":
    main()
