"""The plan: bytes of each kind on the ranks of each pipeline stage, on the device and the host."""

from __future__ import annotations

from dataclasses import dataclass

from easyrl.config import Config
from easyrl.config.records import RecordsConfig
from easyrl.engines.megatron.layout import Layout
from easyrl.memory_plan.held import Held, HeldPlan
from easyrl.memory_plan.model_shape import ModelShape, model_shape
from easyrl.memory_plan.running import Running, RunningPlan
from easyrl.memory_plan.stages import Stage, stages
from easyrl.recipes.loading import load_recipe, run_settings


@dataclass(frozen=True)
class StagePlan:
    """One rank of a pipeline stage; all ranks of a stage need as much."""

    stage: Stage
    held: Held
    running: Running

    @property
    def held_bytes(self) -> float:
        """All the time."""
        held = self.held
        return held.weights + held.frozen + held.gradients + held.optimizer + held.critic

    @property
    def running_bytes(self) -> float:
        """Beside what is held, while a micro-batch runs."""
        running = self.running
        return running.activations + running.working + running.buffers

    @property
    def needed(self) -> float:
        """On the device, at the peak."""
        return self.held_bytes + max(self.running_bytes, self.held.step)


@dataclass(frozen=True)
class MemoryPlan:
    """Of all ranks."""

    shape: ModelShape
    layout: Layout
    row_tokens: int  # of the longest packed row
    stages: tuple[StagePlan, ...]

    @property
    def needed(self) -> float:
        """Of the rank that needs most."""
        return max(stage.needed for stage in self.stages)


def plan_memory(
    config: Config, world_size: int, *, on_cpu: bool = False, shape: ModelShape | None = None
) -> MemoryPlan:
    """What ``world_size`` ranks will need. Reads ``config.json`` of each model, no weights.

    ``on_cpu``: for ranks without an accelerator, where chunks of the projection are smaller.
    ``shape``: the policy's, where it is known. Raises ``ConfigError`` naming the key if a model, or
    the number of ranks, does not fit.
    """
    shape, layout = shape or model_shape(config.model), Layout.of(config.parallel, world_size)
    recipe = load_recipe(config)
    row_tokens = _longest_row(config, whole_groups=recipe.span == "group")
    held = HeldPlan(config, shape, recipe, layout.data)
    running = RunningPlan(config, shape, recipe, layout, row_tokens, on_cpu)
    planned = [
        StagePlan(stage, held.on_rank(stage), running.on_rank(stage))
        for stage in stages(shape, layout)
    ]
    return MemoryPlan(shape, layout, row_tokens, tuple(planned))


def _longest_row(config: Config, *, whole_groups: bool) -> int:
    """Tokens: what cannot be split gets a row of its own, however long."""
    run = run_settings(config)
    prompt = 0 if isinstance(config, RecordsConfig) else config.data.max_prompt_tokens
    responses = run.num_generations if whole_groups else 1
    longest = prompt + responses * run.max_tokens
    return max(config.trainer.max_tokens_per_micro_batch, longest)
