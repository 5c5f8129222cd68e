"""Which parameters the ranks of each pipeline stage have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from easyrl.engines.megatron.layout import Layout
from easyrl.engines.megatron.splittable import architecture_of, check_sizes, stage_of
from easyrl.engines.megatron.weights.mapping import TIED_HEAD, Rule, Split, rules
from easyrl.engines.megatron.weights.pieces import padded_size
from easyrl.memory_plan.model_shape import ModelShape, Shape


@dataclass(frozen=True)
class Stage:
    """What one tensor rank of a pipeline stage has of a model; all of them have as much."""

    number: int  # from 0
    num_layers: int
    parameters: tuple[int, ...]  # elements of each parameter
    is_first: bool
    is_last: bool

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters)


def stages(shape: ModelShape, layout: Layout) -> list[Stage]:
    """In the order of the pipeline; a model that is not split is one stage.

    Raises ``ConfigError`` naming the key of ``parallel`` that does not fit the model.
    """
    if layout.tensor * layout.pipeline == 1:
        whole = tuple(map(prod, shape.parameters.values()))
        return [Stage(0, shape.num_layers, whole, is_first=True, is_last=True)]
    check_sizes(shape.config, layout)
    every = rules(architecture_of(shape.config), shape.num_layers, tied=shape.tied)
    if shape.tied and layout.pipeline == 1:
        every.pop(TIED_HEAD.parameter)
    own: list[list[int]] = [[] for _ in range(layout.pipeline)]
    for rule in every.values():
        stage = stage_of(rule.parameter, shape.num_layers, layout)
        own[stage].append(_elements(rule, shape.parameters, layout.tensor))
    last = layout.pipeline - 1
    return [
        Stage(
            stage,
            sum(len(layout.layers_of(stage, c, shape.num_layers)) for c in range(layout.chunks)),
            tuple(some),
            is_first=stage == 0,
            is_last=stage == last,
        )
        for stage, some in enumerate(own)
    ]


def _elements(rule: Rule, shapes: Mapping[str, Shape], num_ranks: int) -> int:
    """Of a parameter on one tensor rank, with the rows that pad a vocabulary."""
    total = sum(prod(shapes[name]) for name in rule.tensors)
    match rule.split:
        case Split.WHOLE:
            return total
        case Split.ROWS:
            rows, *others = shapes[rule.tensors[0]]
            return padded_size(rows, num_ranks) // num_ranks * prod(others)
        case _:
            return total // num_ranks
