"""What TRL's process is given to do, and what it answers."""

from __future__ import annotations

import msgspec

from benchmarks.parts.end_to_end.rows import Measured


class TrlJob(msgspec.Struct):
    """Sizes of the runs, named as ours are."""

    model: str
    prompts: str
    reward: str
    batch_size: int
    num_generations: int
    max_tokens: int
    min_tokens: int
    learning_rate: float
    kl_coef: float
    num_threads: int
    micro_batches: list[int]  # sequences; a run for each
    num_steps: int
    seed: int
    measure_heldout: bool  # of the trained model


class TrlRun(msgspec.Struct):
    """A run with one micro-batch."""

    micro_batch: int
    measured: Measured
