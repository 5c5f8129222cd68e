"""Keys and values of prompts, held once for all sequences that have the same prompt.

Shape legend: U prompts that were computed together, H key-value heads, P positions, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

StatesOfLayers = Sequence[tuple[Tensor, Tensor]]  # per layer keys and values


@dataclass(eq=False, slots=True)
class PromptStates:
    """Of one prompt but its last token, which every sequence decodes for itself."""

    layers: StatesOfLayers  # [U, H, P, d] each, padded behind the shorter prompts
    index: int  # of the prompt, in U
    length: int
    is_apart: bool  # attention reads them here (U = 1, no padding), else from the slots
    num_users: int = 0


class PromptStore:
    """Prompt states by prompt, as long as a running sequence has them, and the last used ones."""

    def __init__(self) -> None:
        self._states: dict[bytes, PromptStates] = {}
        self._unused: bytes | None = None  # at most one

    def find(self, prompt_key: bytes) -> PromptStates | None:
        return self._states.get(prompt_key)

    def take(self, prompt_key: bytes, states: PromptStates) -> None:
        """One more sequence runs with these."""
        self._states.setdefault(prompt_key, states)
        states.num_users += 1
        if self._unused == prompt_key:
            self._unused = None

    def release(self, prompt_key: bytes, states: PromptStates) -> None:
        """One sequence less."""
        states.num_users -= 1
        if states.num_users == 0 and self._states.get(prompt_key) is states:
            if self._unused is not None:
                del self._states[self._unused]
            self._unused = prompt_key

    def forget(self) -> None:
        """None is found any more; who has one keeps it."""
        self._states.clear()
        self._unused = None
