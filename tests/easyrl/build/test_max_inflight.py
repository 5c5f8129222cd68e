"""``inference.max_inflight: auto`` in a run: strict mode, what training tells, when limits hold."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from easyrl.build.accumulation import build_accumulator
from easyrl.build.evaluation import schedule_evaluation
from easyrl.build.inference import Inference, Scoring, inference_settings, open_inference
from easyrl.build.servers import StartedServers, max_num_seqs
from easyrl.completion_check import Vocabulary
from easyrl.config import Config, EvaluationConfig, LaunchConfig
from easyrl.config.file import validate_config
from easyrl.dataloaders.producer.draws import Draws
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.inference_client.pool.decode_speed import TimedResponse
from easyrl.inference_client.pool.group_assignment import GroupAssignment
from easyrl.metrics.event_log import ignore
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.stopping import StopRequest
from easyrl.runtime.watchdog import TokenProgress
from easyrl.runtime.workers.worker_pool import WorkerPool
from easyrl.schema import Prompt
from tests.easyrl.build.test_wiring_recipe import Engine, Ready, groups_of_sizes
from tests.inference_client.fake_endpoint import FakeEndpoint
from tests.waiting import wait_until


class Whole(Ready):
    def complete(self) -> None: ...


def config(folder: Path, determinism: str = "none", recipe: str = "grpo", **inference: object):
    return validate_config(
        {
            "run": {"determinism": determinism},
            "model": {"path": str(folder), "dtype": "fp32"},
            "data": {"files": ["prompts.jsonl"]},
            "inference": {"endpoints": ["http://127.0.0.1:1"], **inference},
            "rewards": [{"name": "exact"}],
            "recipe": {"name": recipe},
            "evaluation": {
                "data": {"files": ["held-out.jsonl"]},
                "every_steps": 1,
                "num_samples": 4,
            },
        }
    )


@pytest.mark.parametrize(
    "determinism, given, used",
    [("none", {}, "auto"), ("strict", {}, 256), ("strict", {"max_inflight": 7}, 7)],
)
def test_strict_mode_keeps_256(tmp_path, determinism, given, used):
    assert inference_settings(config(tmp_path, determinism, **given)).max_inflight == used


@pytest.mark.parametrize(
    "options, most",
    [
        (["--max-num-seqs=8"], 8),
        (["--dtype=float32", "--max-num-seqs", "8", "--max-model-len", "64"], 8),
        (["--max_num_seqs=8"], 8),
        (["--max-num-seqs=8", "--max-num-seqs", "16"], 16),  # the last one wins
        (["--max-num-seqs=8", "--data-parallel-size=2"], 16),
        (["--max-num-seqs=8", "-dp", "2"], 16),
        ([], None),
        (["--max-num-seqs-x=8", "--max-num-batched-tokens=9"], None),
        (["--max-num-seqs"], None),  # a mistake, of which the server tells
        (["--max-num-seqs=-1"], None),
        (["--max-num-seqs=0"], None),
        (["--max-num-seqs", "--dtype=float32"], None),
    ],
)
def test_a_launched_server_s_command_line_says_what_it_takes(options, most):
    assert max_num_seqs(LaunchConfig(engine="embedded", options=options)) == most


@pytest.fixture
def inference(tmp_path: Path) -> Iterator[Inference]:
    """Of a run whose own server was started with eight places, and one that somebody else runs."""
    launch = {"engine": "embedded", "options": ["--max-num-seqs=8"]}
    settings = config(tmp_path, launch=launch)
    with ExitStack() as opened:
        scoring = Scoring(opened.enter_context(LoopThread()), WorkerPool(1))
        own, other = group = [FakeEndpoint(), FakeEndpoint()]
        for server in group:
            scoring.thread.run(server.listen())
            opened.callback(lambda server=server: scoring.thread.run(server.stop()))
        servers = StartedServers([own.url, other.url], {own.url: "key"})
        yield open_inference(settings, opened, scoring, vocabulary=Vocabulary(512), servers=servers)


def test_what_the_run_launches_is_given_no_more_than_it_takes(inference):
    wait_until(lambda: all(each.served is not None for each in inference.pool.endpoints), 20)
    assert [each.max_inflight for each in inference.pool.endpoints] == [8, 256]


@pytest.mark.parametrize("recovered, num_begun, counts", [(0, 1, 1), (1, 1, 0), (0, 2, 0)])
def test_a_batch_is_learnt_from_if_all_of_it_was_asked_for_once(
    inference, recovered, num_begun, counts
):
    """By what the producer tells as it begins one."""
    learnt, limits, rollouts = [], inference.pool.limits, inference.rollouts()
    wait_until(lambda: all(each.served is not None for each in inference.pool.endpoints), 20)
    endpoint = inference.pool.endpoints[0]
    limits._adaptive[endpoint].end_batch = lambda train_s, now_s: learnt.append(
        limits._adaptive[endpoint].num_responses
    )
    prompt = Prompt(0, np.array([1], np.int32), "", None)
    stored = [(0, SimpleNamespace(refused=None, lengths=[3], num_tokens=3, is_recovered=True))]
    for _ in range(num_begun):
        draws = Draws(BatchMembership(1, num_left=0))
        batch = rollouts.produce_batch(
            draws, lambda _: prompt, "r:0:1", recovered=stored[:recovered]
        )
        batch.close()
    group = GroupAssignment((0, 0.0, 0), "r:0:1", 24, 8)
    limits.answered(endpoint, group, TimedResponse(0.0, 1.0, 10))
    limits.end_batch()
    assert learnt == [counts]
    limits.answered(endpoint, group, TimedResponse(0.0, 1.0, 10))
    limits.end_batch()
    assert learnt == [counts, 1 + counts], "the next one counts again"


def trained(settings: Config, synchronous: bool) -> list[tuple[float, int]]:
    """What an accumulator that is given 4 groups tells of its training."""
    told: list[tuple[float, int]] = []
    with closing(StopRequest(60.0)) as stop:
        build_accumulator(
            settings,
            Engine(stop),  # type: ignore[arg-type]
            Collectives(Ranks.data_parallel(0, 1)),
            stop,
            record=ignore,
            synchronous=synchronous,
            on_trained=lambda seconds, num_groups: told.append((seconds, num_groups)),
        ).accumulate(Whole(groups_of_sizes()))  # type: ignore[arg-type]
    return told


def test_training_tells_its_seconds_and_groups(tmp_path):
    ((seconds, num_groups),) = trained(config(tmp_path), synchronous=False)
    assert seconds >= 0.0 and num_groups == 4


def test_training_that_waits_for_the_last_group_tells_nothing(tmp_path):
    assert trained(config(tmp_path), synchronous=True) == []


class Batch:
    """An open batch with an evaluation beside it, whose prompts wait for ``room``."""

    def __init__(self, folder: Path, chosen: int, most: int, num_undecided: int) -> None:
        self.lifted = 0
        pool = SimpleNamespace(
            capacity=lambda in_batch: chosen if in_batch else most,
            is_wanted=lambda before: False,
            limits=SimpleNamespace(lift=self._lift),
        )
        self.rollouts = SimpleNamespace(num_undecided=num_undecided)
        run = SimpleNamespace(
            config=config(folder),
            collectives=None,
            signals=SimpleNamespace(stop=None),
            tokens=TokenProgress(),
        )
        assert run.config.rollout.num_generations == 8
        inference = SimpleNamespace(pool=pool, evaluator=self._evaluator)
        data = SimpleNamespace(held_out=[])
        schedule_evaluation(run, data, inference, self.rollouts, from_step=0)  # type: ignore[arg-type]

    def _lift(self) -> None:
        self.lifted += 1

    def _evaluator(self, config: EvaluationConfig, *others: Any) -> SimpleNamespace:
        self.room = others[-1]
        return SimpleNamespace(config=config)

    async def beside(self, num_samples: int) -> int:
        """Prompts of so many samples that are asked for while the batch is as it is."""
        num_admitted = 0

        async def prompt() -> None:
            nonlocal num_admitted
            async with self.room.places(num_samples):
                num_admitted += 1
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(prompt()) for _ in range(300)]
        for _ in range(5):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return num_admitted


def test_an_evaluation_has_all_places_once_the_batch_is_decided(tmp_path):
    batch = Batch(tmp_path, chosen=8, most=8, num_undecided=2)
    batch.rollouts.on_decision()
    assert batch.lifted == 0
    batch.rollouts.num_undecided = 0
    batch.rollouts.on_decision()
    assert batch.lifted == 1


@pytest.mark.parametrize(
    "chosen, most, num_undecided, num_prompts",
    [
        # an eighth of 256 places: three groups of eight, and two prompts of four; then more
        (256, 256, 4, 0),
        (256, 256, 3, 2),
        (256, 256, 1, 6),
        # ... whatever the batch was given of them
        (64, 256, 3, 2),
        (32, 256, 3, 2),
        # ... as far as there are so many
        (16, 256, 2, 0),
        (16, 256, 1, 2),
        # where an eighth is less than a group and a prompt, these: the last group's tail
        (64, 64, 2, 0),
        (64, 64, 1, 1),
        (16, 16, 2, 0),
        (16, 16, 1, 1),
        # no group of the batch ever waits for an evaluation
        (11, 256, 1, 0),
        (8, 8, 1, 0),
        (0, 0, 1, 0),
    ],
)
async def test_an_evaluation_begins_in_its_batch_s_tail_with_any_limit(
    chosen, most, num_undecided, num_prompts, tmp_path
):
    """A group has eight samples, a prompt of the evaluation four."""
    batch = Batch(tmp_path, chosen, most, num_undecided)
    assert await batch.beside(num_samples=4) == num_prompts
    batch.rollouts.num_undecided = 0
    assert await batch.beside(num_samples=4) == 300
