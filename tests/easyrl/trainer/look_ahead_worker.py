"""Whole batches on a real engine with and without look-ahead; prints what they came to as JSON.

Started with a folder that ``engine_cases.prepare`` filled. The producer is the real one; it answers
when ``Script`` says so, which is told of each piece of work, so that every run has the same
responses computed ahead whatever the machine is busy with. ``test_look_ahead_engine.py`` says what
the figures have to be.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easyrl.build.accumulation import rows_per_drain
from easyrl.build.recipe import group_functions
from easyrl.config import Config, ModelConfig
from easyrl.config.file import validate_config
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.engines.base import MetricSums
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.metrics.event_log import ignore
from easyrl.models.loading import load_policy_model
from easyrl.recipes.loading import load_recipe
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import Completion, FrozenLogprobs, MicroBatch, Prompt, RolloutGroup
from easyrl.trainer.accumulation import Accumulator
from tests.dataloaders.rollout_parts import SumScorer, at_once
from tests.easyrl.engines.engine_cases import CLIP, KL_COEF, MAX_TOKENS, TEMPERATURE
from tests.tiny_models import random_group

G, GROUPS = 4, 5  # of an update
BUDGET = 70
# How many of a group's responses come early: all but one, half, one, none, all.
EARLY = (3, 2, 1, 0, 4)
CASES = {
    "reference": {"recipe": {"kl_coef": KL_COEF}},
    "reference-tree": {"recipe": {"kl_coef": KL_COEF}, "trainer": {"packing": "tree"}},
    "lagged": {"recipe": {"kl_coef": KL_COEF}, "trainer": {"old_policy": "lagged"}},
    "two-updates": {"recipe": {"kl_coef": KL_COEF}, "trainer": {"updates_per_batch": 2}},
    "two-updates-alone": {"trainer": {"updates_per_batch": 2}},  # without a reference
    "lora": {  # the reference is the policy with its adapter off, between two backwards
        "recipe": {"kl_coef": KL_COEF},
        "model": {"lora": {"rank": 4, "alpha": 8}},
    },
    "truncated-masked": {"recipe": {"kl_coef": KL_COEF, "mask_truncated": True}},
    "ppo": {  # values and the KL in the reward come before the advantages
        "recipe": {"name": "ppo", "whiten": False, "kl_in_reward_coef": KL_COEF},
        "critic": {"learning_rate": 2e9},
        "trainer": {"updates_per_batch": 2},
    },
    "ppo-whitened": {"recipe": {"name": "ppo"}, "critic": {"learning_rate": 2e9}},
}
NUM_BATCHES = 2


class Script:
    """Answers early requests at once and the others when all early ones were computed ahead."""

    def __init__(self, groups: Sequence[RolloutGroup], *, holds: bool, masked: bool) -> None:
        self._groups = {group.prompt.index: group for group in groups}
        self._early = {
            (group.prompt.index, sample)
            for number, group in enumerate(groups)
            for sample in range(EARLY[number % len(EARLY)])
        }
        # a group that is complete may be trained before anybody could look ahead
        whole = {i for i, _ in self._early if all((i, s) in self._early for s in range(G))}
        self._awaited = {key for key in self._early if key[0] not in whole}
        if masked:  # not trained, so not computed
            self._awaited -= {
                (i, s) for i, s in self._early if self._groups[i].completions[s].truncated
            }
        self._rest = asyncio.Event()
        if not holds:
            self._rest.set()

    async def __call__(self, prompt: Prompt, sample: int, version: str | None) -> Completion:
        if (prompt.index, sample) not in self._early:
            await self._rest.wait()
        return self._groups[prompt.index].completions[sample]

    def computed(self, row: MicroBatch, loop: asyncio.AbstractEventLoop) -> None:
        self._awaited -= {(key.prompt, key.sample) for key in row.sequences}
        if not self._awaited:
            loop.call_soon_threadsafe(self._rest.set)


class TokenScorer(SumScorer):
    async def score_sample(self, prompt: Prompt, completion: Completion) -> float:
        return float(completion.token_ids.sum() % 7)


class Watched:
    """The engine, and what went through its frozen models ahead of a row."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self.device, self.prepare = engine.device, engine.prepare
        self.finish_backwards = engine.finish_backwards
        self.lockstep = engine.lockstep
        self.has_frozen_models = engine.has_frozen_models
        self.seen: Callable[[MicroBatch], object] = lambda row: None
        self.without_old_policy: list[bool] = []

    def frozen_logprobs(self, row: MicroBatch) -> FrozenLogprobs:
        frozen = self._engine.frozen_logprobs(row)
        self.without_old_policy.append(frozen.old_policy is None)
        self.seen(row)
        return frozen

    def forward_backward(self, rows: Sequence[MicroBatch]) -> list[MetricSums]:
        return self._engine.forward_backward(rows)


def configuration(folder: Path, case: dict[str, Any]) -> Config:
    return validate_config(
        {
            "model": {"path": str(folder / "policy"), "dtype": "fp32"} | case.get("model", {}),
            "data": {"files": [str(folder / "prompts.jsonl")]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "rollout": {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS},
            "recipe": {
                "aggregation": "token",
                "kl_coef": 0.0,
                "clip_eps_low": CLIP,
                "clip_eps_high": CLIP,
            }
            | case.get("recipe", {}),
            "critic": case.get("critic", {}),
            "trainer": {
                "zero_stage": 1,
                "batch_size": 2 * GROUPS,
                # AdamW as plain descent: rounding is not magnified where a gradient is nearly zero
                "adam_eps": 1e9,
                "learning_rate": 2e9,
                "max_tokens_per_micro_batch": BUDGET,
            }
            | case.get("trainer", {}),
        }
    )


def make_groups(batch: int, update: int) -> list[RolloutGroup]:
    """Responses that are longer than their prompt, so that each is worth a row of its own."""
    rng = np.random.default_rng(1000 * batch + update)
    return [
        random_group(
            rng,
            int(rng.integers(3, 6)),
            rng.integers(6, MAX_TOKENS, G).tolist(),
            index=100 * batch + 10 * update + number,
            masked=0.2,
            truncated=(1,) if number % 2 else (),
        )
        for number in range(GROUPS)
    ]


def run(folder: Path, case: dict[str, Any], *, look_ahead: bool) -> tuple[dict[str, Any], Any]:
    """Figures of each update, and the weights behind the last."""
    config = configuration(folder, case)
    recipe = load_recipe(config)
    names = iter(("policy", "reference" if recipe.needs.reference else "old", "old"))
    engine = DeepSpeedEngine(
        config,
        load_model=lambda: load_policy_model(
            ModelConfig(
                path=folder / next(names),
                dtype="fp32",
                logprob_chunk_size=16,
                lora=config.model.lora,
            )
        ),
    )
    watched = Watched(engine)
    masks = config.recipe.settings.get("mask_truncated", False)
    stop = StopRequest(grace_s=60.0)
    accumulator = Accumulator(
        engine=watched,  # type: ignore[arg-type]
        collectives=Collectives(Ranks.data_parallel(0, 1)),
        functions=group_functions(config),
        stop=stop,
        is_interruption=lambda error: False,
        record=ignore,
        max_tokens=BUDGET,
        rows_per_drain=rows_per_drain(config),
        synchronous=False,
        look_ahead=look_ahead and engine.can_look_ahead,
    )
    updates = []
    with LoopThread() as thread:
        for batch in range(NUM_BATCHES):
            engine.begin_batch()
            for update in range(config.trainer.updates_per_batch):
                groups = make_groups(batch, update)
                watched.has_frozen_models = engine.has_frozen_models
                script = Script(
                    groups,
                    holds=look_ahead and engine.has_frozen_models,
                    masked=masks,
                )
                watched.seen = partial(script.computed, loop=thread.loop)
                watched.without_old_policy = []
                generator = RolloutGenerator(
                    thread, at_once(script), TokenScorer(), num_generations=G
                )
                stream = generator.produce([group.prompt for group in groups], "run:0:0")
                stream.accepted_versions = frozenset({"run:0:0"})
                totals = accumulator.accumulate(stream)
                result = engine.optimizer_step(totals.denominator, totals.value_denominator)
                assert totals.interruption is None and not result.skipped
                updates.append(
                    {
                        "grad_norm": result.grad_norm,
                        "ahead": totals.num_look_ahead_tokens,
                        "early": sum(
                            int(c.loss_mask.sum())
                            for number, group in enumerate(groups)
                            for c in group.completions[: EARLY[number]]
                            if EARLY[number] < G and not (masks and c.truncated)
                        ),
                        "trained": totals.metrics.sums["num_loss_tokens"],
                        "without_old_policy": watched.without_old_policy,
                        "sums": totals.metrics.sums,
                        "maxima": totals.metrics.maxima,
                    }
                )
    stop.close()
    weights = {name: weight.clone() for name, weight in engine.named_weights()}
    return {"can": engine.can_look_ahead, "updates": updates}, weights


def difference(got: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor]):
    """The worst of a parameter, of how far it has moved; those that stayed are equal."""
    moved = {name: float((expected[name] - start[name]).norm()) for name in expected}
    assert max(moved.values()) > 0
    assert all(torch.equal(got[name], start[name]) for name in moved if not moved[name])
    return max(
        float((got[name] - expected[name]).norm()) / length
        for name, length in moved.items()
        if length
    )


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    start = {
        name: parameter.detach()
        for name, parameter in load_policy_model(
            ModelConfig(path=folder / "policy", dtype="fp32")
        ).model.named_parameters()
    }
    results = {}
    for name, case in CASES.items():
        without, expected = run(folder, case, look_ahead=False)
        with_, got = run(folder, case, look_ahead=True)
        results[name] = {
            "without": without,
            "with": with_,
            "weights": difference(got, expected, start),
        }
    (folder / "look-ahead.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
