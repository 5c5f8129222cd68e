"""Divisions of a number of devices of a class between inference and training, without a run.

Rates are arithmetic (``roofline``). Tried are servers on 1, 2, 4 and 8 devices and the model's
``SPLITS``; what has not the memory, by ``easyrl plan-memory``, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import erf, log, sqrt
from typing import Literal, NamedTuple

import numpy as np

from easyrl.config import Config, ConfigError
from easyrl.config.file import validate_config
from easyrl.memory_plan.model_shape import ModelShape
from easyrl.memory_plan.plan import plan_memory
from easyrl.memory_plan.verdict import LEFT_FREE
from easyrl.simulation.devices import Assumed, Device
from easyrl.simulation.line_search import search_beside, stride_of
from easyrl.simulation.pipeline import simulate
from easyrl.simulation.roofline import ModelWork, Server, Trainer, rates_of
from easyrl.simulation.setting import Lengths, Outcome, Setting
from easyrl.simulation.split import num_draws_of

SERVER_DEVICES = (1, 2, 4, 8)
CLOSE = 0.97  # bounds are by expected lengths, simulations by drawn ones
MAX_PROMPT_TOKENS = 1024  # that memory is planned for
# of a response with its prompt the paper's asynchronous run had 8,961, if 64 prompts had 16 each
MEAN_TOKENS, MAX_TOKENS = 8_800.0, 15_360


class ModelSplit(NamedTuple):
    """How one copy of the model is trained."""

    tensor: int
    pipeline: int
    zero_stage: Literal[1, 2, 3]

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        parts = [f"ZeRO {self.zero_stage}"]
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        parts += [f"pipeline {self.pipeline}"] if self.pipeline > 1 else []
        return ", ".join(parts)


SPLITS = (
    ModelSplit(1, 1, 2),
    ModelSplit(1, 1, 3),
    *(ModelSplit(tensor, 1, 1) for tensor in (2, 4, 8)),
    *(ModelSplit(8, pipeline, 1) for pipeline in (2, 4)),
)


@dataclass(frozen=True)
class Workload:
    """What a batch is."""

    lengths: Lengths
    batch_size: int = 64
    group_size: int = 16
    prompt_tokens: int = 150
    mode: Literal["async", "sync"] = "async"
    # run beside the policy: the reference; 2: an old policy too, in each micro-batch (paper §4.1)
    frozen: Literal[0, 1, 2] = 1
    shares_prompts: bool = True
    row_tokens: int = 16_384

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.lengths.longest


class Division(NamedTuple):
    """A division of the devices and what comes of it."""

    setting: Setting
    split: ModelSplit
    outcome: Outcome


def lengths_of_mean(mean: float, sigma: float, longest: int = MAX_TOKENS) -> Lengths:
    """Log-normal lengths that have ``mean`` tokens after the cut at ``longest``.

    Raises ``ValueError`` if that is not between 1 and ``longest``.
    """
    if not 1 <= mean < longest:
        raise ValueError(f"--mean-tokens: has to be from 1 to below {longest:,}, and is {mean:g}")
    low, high = log(mean), log(mean) + 20.0  # of the mean before the cut
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_cut(middle, sigma, longest) < mean else (low, middle)
    return Lengths(mean=float(np.exp(low)), sigma=sigma, longest=longest)


def _mean_cut(log_mean: float, sigma: float, longest: int) -> float:
    """E[min(X, c)] of a log-normal X."""
    if sigma == 0:
        return min(float(np.exp(log_mean)), float(longest))
    z = (log(longest) - (log_mean - sigma**2 / 2)) / sigma
    below = float(np.exp(min(log_mean, 700))) * _normal(z - sigma)
    return below + longest * (1 - _normal(z))


def _normal(z: float) -> float:
    return (1 + erf(z / sqrt(2))) / 2


def divide(
    shape: ModelShape, device: Device, devices: int, workload: Workload, assumed: Assumed
) -> list[Division]:
    """The divisions that were worth a simulation, the fastest first.

    Raises ``ValueError`` if the model fits none of them.
    """
    return _Search(shape, device, devices, workload, assumed).run()


class _Candidate(NamedTuple):
    bound_s: float  # no batch is shorter
    setting: Setting
    split: ModelSplit


class _Search:
    """Candidates in the order of what bounds them, until no further one can be faster."""

    def __init__(
        self,
        shape: ModelShape,
        device: Device,
        devices: int,
        workload: Workload,
        assumed: Assumed,
    ) -> None:
        self._shape, self._device, self._devices = shape, device, devices
        self._workload, self._assumed = workload, assumed
        self._work = ModelWork.of(shape)
        drawn = workload.lengths.draw(2000, 16, np.random.default_rng(0)).astype(float)
        self._mean = float(drawn.mean())
        # a sequence is in flight, and a token attends, for as long as there are tokens before it
        own = float((drawn**2).mean()) / (2 * self._mean)
        self._context = workload.prompt_tokens + own
        self._memory = TrainingMemory(shape, workload)

    def run(self) -> list[Division]:
        found: list[Division] = []
        for candidate in sorted(self._candidates(), key=lambda each: each.bound_s):
            if found and CLOSE * candidate.bound_s >= min(each.outcome.step_s for each in found):
                break
            found += self._simulated(candidate)
        if not found:
            raise ValueError(self._why_not())
        best = min(found, key=lambda each: each.outcome.step_s)
        return sorted([*found, *self._beside(best)], key=lambda each: each.outcome.step_s)

    def _simulated(self, candidate: _Candidate) -> list[Division]:
        """None if it has not the memory."""
        _, setting, split = candidate
        if self._memory.needed(split, setting.ranks) > self._device.memory * (1 - LEFT_FREE):
            return []
        num_draws = num_draws_of(setting.batch_size)
        return [Division(setting, split, simulate(setting, num_draws=num_draws))]

    def _beside(self, best: Division) -> list[Division]:
        """With the same servers and split, what lies between the numbers of endpoints on the grid
        and is worth a try."""
        server, split = self._server(best.setting.devices_per_endpoint), best.split
        most = self._most(server, split)
        found: list[Division] = []

        def cost_of(endpoints: int) -> float | None:
            if endpoints == best.setting.endpoints:
                return best.outcome.step_s
            ranks = self._ranks(server, split, endpoints) if 1 <= endpoints <= most else 0
            if not ranks:
                return None
            own = self._simulated(self._candidate(server, split, endpoints, ranks))
            found.extend(own)
            return own[0].outcome.step_s if own else None

        search_beside(best.setting.endpoints, stride_of(most), cost_of)
        return found

    def _servers(self) -> Iterator[Server]:
        """That hold the weights and one sequence of the longest."""
        for number in SERVER_DEVICES:
            server = self._server(number)
            if server.tokens_held >= self._workload.longest:
                yield server

    def _server(self, number: int) -> Server:
        return Server(self._work, self._device, self._assumed, number, self._context)

    def _candidates(self) -> Iterator[_Candidate]:
        for server in self._servers():
            for split in SPLITS:
                most = self._most(server, split)
                for endpoints in range(1, most + 1, stride_of(max(most, 1))):
                    if ranks := self._ranks(server, split, endpoints):
                        yield self._candidate(server, split, endpoints, ranks)

    def _most(self, server: Server, split: ModelSplit) -> int:
        """Endpoints, beside one copy of the model."""
        return (self._devices - split.devices) // server.devices

    def _ranks(self, server: Server, split: ModelSplit, endpoints: int) -> int:
        """A rank without a group has nothing to do."""
        left = self._devices - endpoints * server.devices
        return min(left // split.devices, self._workload.batch_size)

    def _candidate(
        self, server: Server, split: ModelSplit, endpoints: int, ranks: int
    ) -> _Candidate:
        workload = self._workload
        trainer = Trainer(
            self._work,
            self._device,
            self._assumed,
            ranks,
            *split,
            workload.row_tokens,
            self._context,
            workload.frozen,
        )
        rates = rates_of(server, trainer, prompt_tokens=workload.prompt_tokens)
        setting = Setting(
            rates,
            workload.lengths,
            endpoints=endpoints,
            places=server.most_running,
            ranks=ranks,
            batch_size=workload.batch_size,
            group_size=workload.group_size,
            prompt_tokens=workload.prompt_tokens,
            mode=workload.mode,
            shares_prompts=workload.shares_prompts,
            devices_per_endpoint=server.devices,
            devices_per_rank=split.devices,
        )
        responses = workload.group_size * self._mean
        running = server.most_running
        token_s = rates.decode_s(running) / running  # in full servers, the least
        generation_s = workload.batch_size * responses * token_s / endpoints
        prompts = 1 if workload.shares_prompts else workload.group_size
        group_s = (prompts * workload.prompt_tokens + responses) * rates.train_token_s
        training_s = workload.batch_size * group_s / ranks
        if workload.mode == "sync":
            bound_s = generation_s + training_s
        else:  # the last group is trained behind the last response, the first behind its longest
            first_s = self._mean * rates.decode_s(min(workload.group_size, server.most_running))
            bound_s = max(generation_s + group_s, first_s + training_s)
        return _Candidate(bound_s + rates.border_s, setting, split)

    def _why_not(self) -> str:
        own, weights = self._device, self._work.weights / 1e9
        of_device = f"{self._devices} devices of {own.memory / 1e9:.0f} GB ({own.name})"
        if not list(self._servers()):
            return (
                f"--model: {weights:.0f} GB of weights and a sequence of {self._workload.longest:,}"
                f" tokens do not fit a server on {max(SERVER_DEVICES)} of {of_device}"
            )
        return (
            f"--devices: no division of {of_device} has the memory to train this model beside a "
            f"server ({weights:.0f} GB of weights); give more devices, or a class with more memory"
        )


class TrainingMemory:
    """What a rank needs, by ``easyrl plan-memory``'s plan of a run on ``workload``."""

    def __init__(self, shape: ModelShape, workload: Workload) -> None:
        self._shape, self._workload = shape, workload
        self._config = cache(self._config_of)
        self.needed = cache(self._needed)

    def _needed(self, split: ModelSplit, ranks: int) -> float:
        """Bytes; infinite where the model cannot be split so."""
        try:
            plan = plan_memory(self._config(split), ranks * split.devices, shape=self._shape)
        except ConfigError:
            return float("inf")
        return plan.needed

    def _config_of(self, split: ModelSplit) -> Config:
        own = self._workload
        return validate_config(
            {
                "model": {
                    "path": "model",
                    "dtype": "bf16",
                    "activation_checkpointing": "layer",
                },
                "data": {"files": ["prompts.jsonl"], "max_prompt_tokens": MAX_PROMPT_TOKENS},
                "rollout": {
                    "num_generations": own.group_size,
                    "max_tokens": own.lengths.longest,
                },
                "inference": {"endpoints": ["http://server:8000"]},
                "rewards": [{"name": "math"}],
                "recipe": {"name": "grpo", "kl_coef": 0.001 if own.frozen else 0.0},
                "trainer": {
                    "batch_size": own.batch_size,
                    "zero_stage": split.zero_stage,
                    "max_tokens_per_micro_batch": own.row_tokens,
                    "packing": "auto" if own.shares_prompts else "none",
                    "old_policy": "lagged" if own.frozen > 1 else "auto",
                },
                "parallel": {
                    "tensor": split.tensor,
                    "pipeline": split.pipeline,
                    "sequence": split.tensor > 1,
                },
            }
        )
