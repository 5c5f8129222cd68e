"""The rows of ``benchmarks.gpu``: what is measured, on which shapes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["training", "engine", "weights", "head"]


@dataclass(frozen=True)
class ModelShape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    tied: bool


@dataclass(frozen=True)
class GroupShape:
    """A row of one group: the prompt's tokens, responses, and the tokens of each."""

    prompt: int
    responses: int
    length: int

    @property
    def row_tokens(self) -> int:
        return self.prompt + self.responses * self.length

    @property
    def sequence_tokens(self) -> int:
        """With the prompt once for each response."""
        return self.responses * (self.prompt + self.length)


# The sizes of Qwen3's dense models.
MODELS = {
    "0.6B": ModelShape(1024, 3072, 28, 16, 8, 128, 151_936, True),
    "4B": ModelShape(2560, 9728, 36, 32, 8, 128, 151_936, True),
    "8B": ModelShape(4096, 12_288, 36, 32, 8, 128, 151_936, False),
    "tiny": ModelShape(64, 128, 2, 4, 2, 16, 512, False),
}
GROUP = GroupShape(prompt=1024, responses=15, length=1024)  # a row of 16,384 tokens
TINY_GROUP = GroupShape(prompt=40, responses=6, length=40)


@dataclass(frozen=True)
class Row:
    """One row, measured in a process of its own.

    ``optimizer``: fp32 master weights and moments on the device; without, the step is left out, as
    where they are offloaded.
    """

    kind: Kind
    model: str
    variant: str = ""  # what is not the default
    optimizer: bool = True
    recompute: Literal["none", "selective", "layer"] = "selective"
    fused_layers: Literal["auto", "none"] = "auto"
    attention: str = "auto"
    limit_s: int = 60

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.kind, self.model, self.variant)))


# What matters most comes first: time may run out.
ROWS = (
    Row("training", "0.6B"),
    Row("training", "4B", limit_s=75),
    Row("training", "8B", "without optimizer", optimizer=False, limit_s=75),
    Row("weights", "0.6B"),
    Row("weights", "4B"),
    Row("weights", "8B", limit_s=75),
    Row("engine", "0.6B"),
    Row("engine", "4B", limit_s=75),
    Row("head", "0.6B"),
    Row("head", "8B"),
    Row("training", "4B", "plain layers", fused_layers="none", limit_s=75),
    Row("training", "4B", "layer recomputed", recompute="layer", limit_s=75),
    Row("training", "0.6B", "nothing recomputed", recompute="none"),
    Row("training", "0.6B", "merged attention", attention="merged"),
)
SMOKE_ROWS = (
    Row("training", "tiny"),
    Row("training", "tiny", "without optimizer", optimizer=False, recompute="layer"),
    Row("weights", "tiny"),
    Row("engine", "tiny"),
    Row("head", "tiny"),
)


def rows_of(smoke: bool) -> dict[str, Row]:
    return {row.name: row for row in (SMOKE_ROWS if smoke else ROWS)}
