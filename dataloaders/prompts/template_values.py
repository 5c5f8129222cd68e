"""Values of a template's placeholders: every prompt has one of each list, drawn anew per epoch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import overload

from easyrl.schema import Prompt

Value = str | int | float
Choices = Mapping[str, Sequence[Value]]  # by placeholder


def combinations(choices: Choices) -> list[dict[str, Value]]:
    """Every choice of one value for each placeholder, the last one's changing fastest."""
    return [dict(zip(choices, chosen, strict=True)) for chosen in product(*choices.values())]


def filled(template: str, values: Mapping[str, Value]) -> str:
    """``template`` with the placeholders ``{name}`` of ``values``; other braces stay.

    Not ``str.format``: templates are full of LaTeX. What is filled in is not read again.
    """
    return re.sub(
        r"\{(\w+)\}",
        lambda match: str(values[match[1]]) if match[1] in values else match[0],
        template,
    )


def placeholders(template: str, choices: Choices) -> set[str]:
    """The names of ``choices`` that are in ``template``."""
    return {name for name in choices if f"{{{name}}}" in template}


class TemplatedPrompts(Sequence[Prompt]):
    """Prompts whose text depends on drawn values; as a sequence those of epoch 0.

    What a prompt is in an epoch depends on ``seed``, the epoch, its index and the placeholders'
    names alone, so that a resumed run, each rank and each machine draw the same.

    Args:
        choices: of each placeholder.
        variants: of each prompt one for every one of ``combinations(choices)``, in their order.
    """

    def __init__(
        self, choices: Choices, variants: Sequence[Sequence[Prompt]], *, seed: int
    ) -> None:
        self.choices, self.variants, self.seed = choices, variants, seed

    def in_epoch(self, index: int, epoch: int) -> Prompt:
        """Prompt ``index`` with the values that are drawn for it in ``epoch``."""
        number = 0
        for name, choices in self.choices.items():
            number = number * len(choices) + self._draw(name, index, epoch)
        return self.variants[index][number]

    def _draw(self, name: str, index: int, epoch: int) -> int:
        """Which of the placeholder's values; each placeholder is drawn by itself."""
        key = f"{self.seed}:{epoch}:{index}:{name}".encode()
        drawn = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return drawn % len(self.choices[name])

    def __len__(self) -> int:
        return len(self.variants)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self.in_epoch(each, 0) for each in range(*index.indices(len(self)))]
        return self.in_epoch(range(len(self))[index], 0)


def every_variant(prompts: Sequence[Prompt]) -> Iterable[Prompt]:
    """All that the prompts can be in some epoch, in order."""
    if not isinstance(prompts, TemplatedPrompts):
        return prompts
    return (prompt for variants in prompts.variants for prompt in variants)


def prompt_of(prompts: Sequence[Prompt], index: int, epoch: int) -> Prompt:
    """Prompt ``index`` as it is in ``epoch``; its own ``epoch`` is not set."""
    if isinstance(prompts, TemplatedPrompts):
        return prompts.in_epoch(index, epoch)
    return prompts[index]
