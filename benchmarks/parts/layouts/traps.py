"""Mistakes that give wrong numbers in silence, planted to see that the comparison finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from easyrl.engines.megatron import engine, modules, pipeline, stage, trainable


def _norms_not_summed() -> None:
    """Gradients of norms under tensor parallelism are each rank's own."""
    made = modules.RMSNorm.__init__

    def init(self: Any, config: Any, hidden_size: int, eps: float, **rest: Any) -> None:
        made(self, config, hidden_size, eps, **rest)
        self._is_summed = False

    modules.RMSNorm.__init__ = init  # type: ignore[method-assign]


def _split_not_marked() -> None:
    """The norm counts split parameters on one tensor rank only."""
    stage.PolicyStage._mark_split = lambda self: None  # type: ignore[method-assign]


def _tied_not_summed() -> None:
    """First and last stage each step a tied embedding with their own gradient."""
    engine.sum_tied_embeddings = lambda *_: None


def _tied_counted_twice() -> None:
    """The norm counts the copy of a tied embedding too."""

    def none(chunks: Any) -> Iterator[Any]:
        yield from ()

    trainable.copied_embeddings = none


def _loss_divided() -> None:
    """megatron-core's mean over micro-batches in place of a sum."""
    of_sums = pipeline._step

    def of_means(at_end: Any) -> Any:
        step = of_sums(at_end)

        def of_two(places: Any, chunk: Any) -> Any:
            output, loss = step(places, chunk)
            if loss is None:
                return output, None
            return output, lambda tensor: (tensor * 1.0, loss(tensor)[2])

        return of_two

    pipeline._step = of_means


def _vocabulary_summed_twice() -> None:
    """The head's gradient is summed over tensor ranks, and again by the gather before it."""
    made = stage.VocabShard

    def shard(group: Any, start: int, size: int, reduce_hidden: bool = True) -> Any:
        return made(group, start, size, not reduce_hidden)

    stage.VocabShard = shard  # type: ignore[assignment, misc]


def _padding_trained() -> None:
    """The padding token's embedding gets a gradient, which Hugging Face's does not."""
    made = stage.PolicyStage.__init__

    def init(self: Any, *args: Any, **settings: Any) -> None:
        made(self, *args, **settings)
        self._padding_id = None

    stage.PolicyStage.__init__ = init  # type: ignore[method-assign]


TRAP = "EASYRL_BENCH_TRAP"  # environment of a launch: which is planted
# By name: the mistake, and a layout in which it shows.
TRAPS: dict[str, tuple[Callable[[], None], str]] = {
    "norms-not-summed": (_norms_not_summed, "tp2sp"),
    "split-not-marked": (_split_not_marked, "tp2"),
    "tied-not-summed": (_tied_not_summed, "pp2"),
    "tied-counted-twice": (_tied_counted_twice, "pp2"),
    "loss-divided": (_loss_divided, "pp2-flush"),
    "padding-trained": (_padding_trained, "tp2"),
    "vocabulary-summed-twice": (_vocabulary_summed_twice, "tp2"),
}


def plant(name: str) -> None:
    """In this process, for good."""
    assert torch.distributed.is_initialized()
    TRAPS[name][0]()
