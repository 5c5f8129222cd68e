"""How long generation and training of one batch take by schedules that cost nothing.

Times are seconds of one core, each phase alone; ``Slowdown`` says how much longer they take while
the other one is at work, since cores of one machine share memory and caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

NUM_CORES = 2


class Group(msgspec.Struct):
    """A finished group."""

    complete_s: float  # after the batch's first request
    row_tokens: int  # its share of the training: of its packed row; 0 if it is not run


class Slowdown(msgspec.Struct, frozen=True):
    """How many times as long each takes while the other one is at work."""

    generation: float = 1.0
    training: float = 1.0


ALONE = Slowdown()


def started_together(generation_s: float, training_s: float, slowdown: Slowdown = ALONE) -> float:
    """Both from the first moment on, a core each; once one has ended, training has both.

    As if nothing had to be generated before it is trained. Or one behind the other, where that
    takes less.
    """
    generated_s = generation_s * slowdown.generation
    if generated_s < training_s * slowdown.training:
        left_s = training_s - generated_s / slowdown.training
        together_s = generated_s + left_s / NUM_CORES
    else:
        trained_s = training_s * slowdown.training
        together_s = trained_s + generation_s - trained_s / slowdown.generation
    return min(together_s, generation_s + training_s / NUM_CORES)


def as_they_arrive(groups: Sequence[Group], training_s: float, slowdown: Slowdown = ALONE) -> float:
    """Seconds from the first request to the last gradient of groups trained one after the other.

    Each costs its share of ``training_s`` by the tokens of its row, and none begins before it is
    complete. Behind the last group's completion both cores train. Generation is as slow as beside
    training throughout, though it is alone until the first group is complete.
    """
    total = sum(group.row_tokens for group in groups)
    generated_s = max(group.complete_s for group in groups) * slowdown.generation
    ended_s = 0.0
    for group in sorted(groups, key=lambda group: group.complete_s):
        cost_s = training_s * group.row_tokens / total if total else 0.0
        start_s = max(ended_s, group.complete_s * slowdown.generation)
        beside_s = max(0.0, generated_s - start_s)  # the server has the other core
        done_s = min(cost_s, beside_s / slowdown.training)
        ended_s = start_s + done_s * slowdown.training + (cost_s - done_s) / NUM_CORES
    return ended_s
