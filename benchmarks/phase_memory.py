"""What looking at the memory of each phase costs the trainer.

``python -m benchmarks.phase_memory [--seconds 0.5] [--repeats 60]``

A thread of Python bytecode, as the trainer's between two kernels, is timed with the peaks of its
phases taken (``easyrl/runtime/phase_memory.py``) and without, in turns; a phase ends ``--phases``
times a second. ``end_us``: what the end of a phase takes by itself, beside what the clock takes;
``slowdown``: median of the paired ratios of loops in ``--seconds``, less one, with its quartiles;
``sampling``: processor time of the thread that looks meanwhile, per second. Of the host alone: a
device's allocator is asked once more there.

The last line is JSON: ``{"end_us", "slowdown", "quartiles", "sampling", "phases_per_s"}``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from easyrl.runtime.phase_clock import PhaseClock
from easyrl.runtime.phase_memory import PhaseMemory

NUM_ENDS = 2000


@contextmanager
def clock_of(*, watched: bool) -> Iterator[PhaseClock]:
    """A clock whose phases are watched, or not."""
    if not watched:
        yield PhaseClock()
        return
    memory = PhaseMemory(torch.device("cpu"))
    try:
        yield PhaseClock(memory.end_of_phase)
    finally:
        memory.close()


def end_us(*, watched: bool) -> float:
    """Microseconds of one beginning or end of a phase, the mean of many."""
    with clock_of(watched=watched) as clock:
        start = time.perf_counter()
        for _ in range(NUM_ENDS):
            with clock.phase("train"):
                pass
        return (time.perf_counter() - start) / (2 * NUM_ENDS) * 1e6


def loops(seconds: float, phases_per_s: float, *, watched: bool) -> int:
    """Passes through a loop of bytecode within ``seconds``."""
    done = 0
    with clock_of(watched=watched) as clock:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            with clock.phase("train"):
                of_phase = time.perf_counter() + 1 / phases_per_s
                while time.perf_counter() < of_phase:
                    sum(range(1000))
                    done += 1
    return done


def sampling_share(seconds: float = 2.0) -> float:
    """Seconds of a core for each second in which the trainer's thread sleeps."""
    with clock_of(watched=True):
        start, start_s = time.process_time(), time.perf_counter()
        time.sleep(seconds)
        return (time.process_time() - start) / (time.perf_counter() - start_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="What memory by phase costs.")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one measurement")
    parser.add_argument("--repeats", type=int, default=60, help="pairs of measurements")
    parser.add_argument("--phases", type=float, default=100.0, help="phases a second")
    arguments = parser.parse_args()
    ends = [end_us(watched=True) - end_us(watched=False) for _ in range(9)]
    ratios = []
    for repeat in range(arguments.repeats):
        found = {}
        for watched in (True, False) if repeat % 2 else (False, True):
            found[watched] = loops(arguments.seconds, arguments.phases, watched=watched)
        ratios.append(found[False] / found[True] - 1)
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    print(
        json.dumps(
            {
                "end_us": round(statistics.median(ends), 1),
                "slowdown": round(middle, 4),
                "quartiles": [round(lower, 4), round(upper, 4)],
                "sampling": round(sampling_share(), 5),
                "phases_per_s": arguments.phases,
            }
        )
    )


if __name__ == "__main__":
    main()
