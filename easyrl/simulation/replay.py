"""A run's own batches, simulated one by one: what its simulation is to be compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from easyrl.simulation.calibrate import seconds_of, trained_share_of
from easyrl.simulation.pipeline import simulate_batch
from easyrl.simulation.setting import Setting
from easyrl.timeline.spans import REQUEST, BatchSpans, spans_of


class ReplayedBatch(NamedTuple):
    """Seconds from a batch's first phase to the next batch's."""

    measured_s: float
    simulated_s: float


def replayed(batches: Sequence[Sequence[BatchSpans]], setting: Setting) -> list[ReplayedBatch]:
    """Each of ``batches`` with its own lengths, and as many of its tokens trained as were.

    ``setting``: what they are calibrated to. Those without a request are left out.
    """
    found = []
    for of_ranks in batches:
        if lengths := lengths_of(of_ranks, setting.group_size):
            share = trained_share_of(
                [of_ranks], setting.group_size, shares_prompts=setting.shares_prompts
            )
            own = replace(setting, rates=replace(setting.rates, trained_share=share))
            found.append(ReplayedBatch(seconds_of(of_ranks), simulate_batch(own, lengths).step_s))
    return found


def lengths_of(of_ranks: Sequence[BatchSpans], group_size: int) -> list[list[int]]:
    """Tokens of responses, in the order of their requests: a group's are sent together."""
    requests = [span for span in spans_of(of_ranks) if span.name == REQUEST]
    requests.sort(key=lambda request: request.start_s)
    tokens = [int(request.args["response_tokens"]) for request in requests]
    return [tokens[first : first + group_size] for first in range(0, len(tokens), group_size)]
