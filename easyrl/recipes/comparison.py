"""What is gathered per micro-batch to compare the trainer's log-probabilities with the server's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NUM_FIRST_TOKENS = 4  # of a response, that a different prompt hits most


def comparison_sums(
    trainer: Tensor, entropy: Tensor, inference: Tensor, sequence_index: Tensor
) -> dict[str, Tensor]:
    """Sums over the N trained tokens of a micro-batch, for ``logprob_agreement`` to judge.

    Args:
        trainer, inference: log-probabilities [N], of the same dtype
        entropy: [N], nats, of the trainer's distribution
        sequence_index: int64 [N], tokens of a sequence are adjacent
    Returns:
        scalars; the names begin with ``agreement/``
    """
    d = trainer - inference
    first = d.new_ones(len(d))
    later = sequence_index[NUM_FIRST_TOKENS:] == sequence_index[:-NUM_FIRST_TOKENS]
    first[NUM_FIRST_TOKENS:] = (~later).to(first)
    sums = {
        "y": trainer,
        "h": entropy,
        "d": d,
        "yy": trainer * trainer,
        "yh": trainer * entropy,
        "hh": entropy * entropy,
        "yd": trainer * d,
        "hd": entropy * d,
        "dd": d * d,
        "abs": d.abs(),
        "positive": d.clamp(min=0).square(),
        "zeros": (inference == 0) & (trainer < -1e-3),
        "first": first,
        "first_abs": first * d.abs(),
    }
    return {"agreement/num": d.new_tensor(len(d))} | {
        f"agreement/{name}": value.sum() for name, value in sums.items()
    }
