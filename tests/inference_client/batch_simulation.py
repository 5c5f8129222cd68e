"""A batch step by step: an endpoint that decodes, and a trainer; nothing of the product's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from easyrl.inference_client.pool.decode_speed import TimedResponse


@dataclass
class SimulatedBatch:
    """What came when, seconds after the first request."""

    responses: list[list[TimedResponse]]  # by group, in the order of dispatch
    arrivals_s: list[float]  # of groups, in the order of arrival
    trained_s: float  # when the last group was trained


def simulate(
    step_s: Callable[[int], float],  # sequences in a decoding step → its seconds
    groups: Sequence[Sequence[int]],  # tokens of each response
    max_inflight: int,
    train_s: float,  # of a group
) -> SimulatedBatch:
    """One token per sequence and step; a place that becomes free is taken before the next step."""
    requests = [(number, length) for number, group in enumerate(groups) for length in group]
    running: list[list[float]] = []  # group, tokens that are missing, began_s, length
    responses: list[list[TimedResponse]] = [[] for _ in groups]
    arrivals_s, now_s = [], 0.0
    while requests or running:
        while requests and len(running) < max_inflight:
            number, length = requests.pop(0)
            running.append([number, length, now_s, length])
        now_s += step_s(len(running))
        for sequence in running:
            sequence[1] -= 1
        for number, missing, began_s, length in running:
            if missing == 0:
                group = responses[int(number)]
                group.append(TimedResponse(began_s, now_s, int(length)))
                if len(group) == len(groups[int(number)]):
                    arrivals_s.append(now_s)
        running = [sequence for sequence in running if sequence[1] > 0]
    free_s = 0.0
    for arrival_s in arrivals_s:
        free_s = arrival_s + train_s if arrival_s > free_s else free_s + train_s
    return SimulatedBatch(responses, arrivals_s, free_s)
