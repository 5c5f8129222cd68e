"""What groups without signal cost with and without leaving them out, and that the gradient stays.

``python -m benchmarks.flat_groups [--repeats 5] [--prompts 40]``

One optimizer step of a small model on fixed responses, of which 0, 50 and 90 % of the groups have
equal rewards: packing, forward and backward through the trainer's own accumulation and DeepSpeed
engine, then the step. Seconds are the process's processor time with one thread, pinned to one core:
what else the machine does counts for nothing. Medians over repeats in which the two ways take
turns, on one engine.

The gradients are compared as movements of the weights: of two engines with the same initial
weights, each takes one step of plain gradient descent (AdamW with an ``eps`` far above every
gradient), scaled so that the weights move farther than their rounding matters. ``max_grad_diff`` is
the largest norm of a difference of two movements, over that of the movement. The last line printed
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.parts.random_model import write_prompts, write_random_model
from easyrl.build.accumulation import rows_per_drain
from easyrl.build.recipe import group_functions
from easyrl.config import Config
from easyrl.config.file import validate_config
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.metrics.event_log import ignore
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.machine import pin_process, usable_cpus
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import Completion, Key, Prompt, RolloutGroup, Score, VersionSpan
from easyrl.trainer.accumulation import Accumulator

VERSION, ENDPOINT = "run:0:0", "http://127.0.0.1:1"
SHARES = (0.0, 0.5, 0.9)  # of the groups, without signal
VOCAB_SIZE, PROMPT_TOKENS, LONGEST, G = 2048, 32, 96, 8
STILL = {"learning_rate": 1e-9}  # repeats train the same policy
DESCENT = {"adam_eps": 1e9, "learning_rate": 1e12, "max_grad_norm": 0.0}  # 1e3 times the gradient


@dataclass(frozen=True)
class Row:
    """A share of groups without signal; processor seconds of a step."""

    flat: float
    step_s: float
    unskipped_s: float


class ReadyGroups:
    """A ``GroupSource``: all groups are there."""

    wait_s = load_s = 0.0
    first_group_wait_s = None
    accepted_versions = frozenset({VERSION})
    recovered: frozenset[Key] = frozenset()
    discarded: frozenset[Key] = frozenset()

    def __init__(self, groups: Sequence[RolloutGroup]) -> None:
        self._groups = list(groups)

    def note_trained(self, num_tokens: int) -> None: ...

    def drain_ready(self, max_tokens: int, idle: object = None) -> list[RolloutGroup]:
        """As many as fit."""
        taken: list[RolloutGroup] = []
        while self._groups and (not taken or _num_tokens(self._groups[0]) <= max_tokens):
            max_tokens -= _num_tokens(self._groups[0])
            taken.append(self._groups.pop(0))
        return taken

    def interrupt(self, error: BaseException) -> None: ...


def random_groups(num_prompts: int, share: float) -> list[RolloutGroup]:
    """The same responses for every ``share``; that share of the groups has equal rewards."""
    rng = np.random.default_rng(0)
    groups = [_random_group(rng, index) for index in range(num_prompts)]
    for index in rng.permutation(num_prompts)[: round(share * num_prompts)]:
        groups[index] = replace(groups[index], scores=(Score(1.0, {}),) * G)
    return groups


def _random_group(rng: np.random.Generator, index: int) -> RolloutGroup:
    def response() -> Completion:
        length = int(rng.integers(LONGEST // 4, LONGEST + 1))
        return Completion(
            token_ids=rng.integers(1, VOCAB_SIZE, length, dtype=np.int32),
            logprobs=np.full(length, -np.log(VOCAB_SIZE), dtype=np.float32),
            finish_reason="stop",
            version_spans=(VersionSpan(VERSION, 0, length),),
            endpoint=ENDPOINT,
            loss_mask=np.ones(length, dtype=bool),
        )

    prompt = Prompt(index, rng.integers(1, VOCAB_SIZE, PROMPT_TOKENS, dtype=np.int32), "", None)
    completions = tuple(response() for _ in range(G))
    scores = tuple(Score(float(i % 2), {}) for i in range(G))
    return RolloutGroup(prompt, completions, scores, VERSION, 0.0, 0.0)


class Steps:
    """Optimizer steps on given groups."""

    def __init__(self, config: Config, stop: StopRequest) -> None:
        self.engine = DeepSpeedEngine(config)
        self._accumulators = {
            skip: Accumulator(
                engine=self.engine,
                collectives=Collectives(Ranks.data_parallel(0, 1)),
                functions=group_functions(config),
                stop=stop,
                is_interruption=lambda error: False,
                record=ignore,
                max_tokens=config.trainer.max_tokens_per_micro_batch,
                rows_per_drain=rows_per_drain(config),
                synchronous=False,
                skip_without_signal=skip,
            )
            for skip in (True, False)
        }

    def take(self, groups: Sequence[RolloutGroup], *, skip: bool) -> float:
        """One step; processor seconds."""
        start = time.process_time()
        totals = self._accumulators[skip].accumulate(cast(Any, ReadyGroups(groups)))
        result = self.engine.optimizer_step(totals.denominator)
        assert not result.skipped
        return time.process_time() - start

    def weights(self) -> torch.Tensor:
        return torch.cat([w.flatten().double() for _, w in self.engine.named_weights()])


def grad_difference(folder: Path, groups: Sequence[RolloutGroup], stop: StopRequest) -> float:
    """Relative difference of the movements of one step with and without the groups."""
    moved = []
    for skip in (True, False):
        steps = Steps(configuration(folder, len(groups), DESCENT), stop)
        before = steps.weights()
        steps.take(groups, skip=skip)
        moved.append(steps.weights() - before)
    return float((moved[0] - moved[1]).norm() / moved[1].norm())


def measure(folder: Path, num_prompts: int, repeats: int) -> dict[str, Any]:
    """What the last line says."""
    rows, differences = [], []
    with closing(StopRequest(60.0)) as stop:
        steps = Steps(configuration(folder, num_prompts, STILL), stop)
        for share in SHARES:
            groups = random_groups(num_prompts, share)
            differences.append(grad_difference(folder, groups, stop))
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for number in range(repeats + 1):
                for skip in (True, False) if number % 2 else (False, True):
                    spent = steps.take(groups, skip=skip)
                    if number:  # the first warms up
                        seconds[skip].append(spent)
            medians = {skip: statistics.median(spent) for skip, spent in seconds.items()}
            rows.append(Row(share, round(medians[True], 4), round(medians[False], 4)))
            ratio = medians[True] / medians[False]
            print(f"{share:4.0%} without signal: {ratio:.3f} of the time", flush=True)
    return {"rows": [vars(row) for row in rows], "max_grad_diff": max(differences)}


def write_inputs(folder: Path) -> None:
    """The model, and the prompts that a configuration has to name."""
    write_random_model(folder / "model", hidden_size=128, num_layers=3, vocab_size=VOCAB_SIZE)
    write_prompts(folder / "prompts.jsonl", 1, 4)


def configuration(folder: Path, num_prompts: int, trainer: dict[str, float]) -> Config:
    return validate_config(
        {
            "model": {"path": str(folder / "model"), "dtype": "fp32"},
            "data": {"files": [str(folder / "prompts.jsonl")]},
            "inference": {"endpoints": [ENDPOINT]},
            "rewards": [{"name": "exact"}],
            "rollout": {"num_generations": G, "max_tokens": LONGEST},
            "recipe": {"name": "grpo", "aggregation": "token", "kl_coef": 0.0},
            "trainer": {
                "zero_stage": 0,
                "batch_size": num_prompts,
                "max_tokens_per_micro_batch": 2048,
            }
            | trainer,
        }
    )


def _num_tokens(group: RolloutGroup) -> int:
    return len(group.prompt.token_ids) + sum(len(c.token_ids) for c in group.completions)


def main() -> int:
    parser = argparse.ArgumentParser(description="The cost of groups without signal.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=40)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    disable_progress_bar()
    torch.set_num_threads(1)
    pin_process(0, usable_cpus()[-1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        result = measure(folder, arguments.prompts, arguments.repeats)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
