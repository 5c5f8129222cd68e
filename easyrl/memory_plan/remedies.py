"""Changes of a configuration that would let it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from easyrl.config import Config, ConfigError
from easyrl.memory_plan.plan import MemoryPlan, plan_memory

MOST = 3  # changes that are named

Load = Callable[[Sequence[str]], Config]  # with further ``key.path=value``; raises ``ConfigError``


@dataclass(frozen=True)
class Change:
    """What a user would add to the command."""

    overrides: tuple[str, ...] = ()
    world_size: int | None = None  # None: as it is

    def __add__(self, other: Change) -> Change:
        return Change(self.overrides + other.overrides, other.world_size or self.world_size)

    def __str__(self) -> str:
        size = () if self.world_size is None else (f"{self.world_size} processes",)
        return " ".join((*self.overrides, *size))


def remedies(load: Load, plan: MemoryPlan, most_bytes: float, *, on_cpu: bool) -> list[Change]:
    """Single changes, or else one of several, with which no rank needs more than ``most_bytes``.

    ``load`` gives the configuration of ``plan``. Empty if none of those that are tried is enough.
    """
    changes = list(_candidates(load(()), plan))
    needs = {each: _needed(load, each, plan, on_cpu) for each in changes}
    if enough := [each for each in changes if needs[each] <= most_bytes]:
        return enough[:MOST]
    together, needed = Change(), plan.needed
    for each in changes:
        more = together + each
        if (with_it := _needed(load, more, plan, on_cpu)) < needed:
            together, needed = more, with_it
        if needed <= most_bytes:
            return [together]
    return []


def _needed(load: Load, change: Change, plan: MemoryPlan, on_cpu: bool) -> float:
    """Infinite if it cannot be run."""
    size = change.world_size or plan.layout.world_size
    try:
        config = load(change.overrides)
        return plan_memory(config, size, on_cpu=on_cpu, shape=plan.shape).needed
    except ConfigError:
        return float("inf")


def _candidates(config: Config, plan: MemoryPlan) -> Iterator[Change]:
    """From what costs least time to what costs most, or more devices."""
    trainer, parallel, layout = config.trainer, config.parallel, plan.layout
    if parallel.tensor > 1 and not parallel.sequence:
        yield Change(("parallel.sequence=true",))
    if config.model.recomputed != "layer":
        yield Change(("model.activation_checkpointing=layer",))
    if layout.data > 1:
        for stage in range(trainer.zero_stage + 1, 4):
            yield Change((f"trainer.zero_stage={stage}",))
    half = trainer.max_tokens_per_micro_batch // 2
    yield Change((f"trainer.max_tokens_per_micro_batch={half}",))
    if not trainer.offload_reference:
        yield Change(("trainer.offload_reference=true",))
    if not trainer.offload_optimizer:
        yield Change(("trainer.offload_optimizer=true",))
    for tensor in (2, 4, 8):
        if tensor > parallel.tensor:
            yield from _split(f"parallel.tensor={tensor}", tensor * parallel.pipeline, plan)
    for pipeline in (2, 4, 8):
        if pipeline > parallel.pipeline:
            yield from _split(
                f"parallel.pipeline={pipeline}",
                *(parallel.tensor * pipeline, plan),
                more=("trainer.zero_stage=1",),
            )
    yield Change(world_size=2 * layout.world_size)


def _split(
    override: str, ranks_per_model: int, plan: MemoryPlan, more: tuple[str, ...] = ()
) -> Iterator[Change]:
    """On as many processes, or the least number that can share the model."""
    size = plan.layout.world_size
    fits = size % ranks_per_model == 0
    yield Change((override, *more), None if fits else -(-size // ranks_per_model) * ranks_per_model)
