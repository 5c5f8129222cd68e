"""Keys and values of the running sequences' prompts: apart for several, or in their slots.

Shape legend: H key-value heads, P positions, d head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from easyrl.inference_client.servers.embedded.cache import Prefilled, SlotCache, StatesOfLayers
from easyrl.inference_client.servers.embedded.requests import Sequence

MIN_APART = 96  # tokens; below, a call of its own for each prompt costs more than it saves
MIN_READS_SAVED = 512  # positions, in each step; fewer are not worth that call either


def is_read_apart(length: int, num_users: int) -> bool:
    """Whether decoding is faster if a prompt is read once, not in the slots of all that have it."""
    return length >= MIN_APART and length * (num_users - 1) >= MIN_READS_SAVED


def longest_in_slots(lengths: Iterable[int], running: int, num_rows: int) -> int:
    """Up to which length prompts belong into slots, so that decoding reads least.

    Attention reads as many positions of each slot as the longest one holds. A few long prompts
    among short sequences are better read apart, for what a call of its own costs each.

    Args:
        lengths: of the prompts that start and would lie in slots.
        running: positions of the longest slot that is in use.
        num_rows: slots with those that start.
    """
    rising = sorted(lengths)
    best, fewest_reads, reads_apart = running, None, 0
    for num_kept in range(len(rising), -1, -1):
        longest = max(running, rising[num_kept - 1]) if num_kept else running
        reads = num_rows * longest + reads_apart
        if fewest_reads is None or reads < fewest_reads:
            best, fewest_reads = longest, reads
        if longest == running or longest < MIN_APART:
            break
        reads_apart += longest + MIN_READS_SAVED
    return best


@dataclass(eq=False, slots=True)
class HeldPrompt:
    """A prompt but its last token, which every sequence decodes for itself."""

    length: int  # P
    layers: StatesOfLayers | None = None  # [1, H, P, d] each; None: only in slots
    in_slots: set[Sequence] = field(default_factory=set)  # who has a copy
    apart: set[Sequence] = field(default_factory=set)  # for whom attention reads ``layers``


class PromptStore:
    """The running sequences' prompts, and the last that was used.

    Args:
        can_share: whether the model's attention can read a prompt apart from the slots.
    """

    def __init__(self, cache: SlotCache, can_share: bool) -> None:
        self._cache = cache
        self._can_share = can_share
        self._known: dict[bytes, HeldPrompt] = {}
        self._held_by: dict[Sequence, HeldPrompt] = {}
        self._unused: bytes | None = None  # at most one

    def __contains__(self, prompt_key: bytes) -> bool:
        return prompt_key in self._known

    def longest_in_slots(
        self, groups: Iterable[list[Sequence]], running: int, num_rows: int
    ) -> int:
        """Of ``groups`` that start, each of one prompt: see ``longest_in_slots``."""
        sizes = [(len(group[0].prompt) - 1, len(group)) for group in groups]
        in_slots = [size[0] for size in sizes if not is_read_apart(*size)]
        return longest_in_slots(in_slots, running, num_rows)

    def start(
        self, group: list[Sequence], prefilled: Prefilled | None, longest: int
    ) -> Prefilled | None:
        """Sequences of one prompt start; what their slots are to hold of it (None: nothing).

        Args:
            prefilled: the prompt's states if it is not known.
            longest: prompts of more tokens are read apart.
        """
        key = group[0].prompt_key
        prompt = self._known.setdefault(key, HeldPrompt(len(group[0].prompt) - 1))
        source = prefilled or self._states(prompt)
        self._held_by |= dict.fromkeys(group, prompt)
        if self._unused == key:
            self._unused = None
        num_users = len(prompt.in_slots) + len(group)
        pays = is_read_apart(prompt.length, num_users) or prompt.length > longest
        if prompt.apart or (self._can_share and pays):
            prompt.layers = source.of_its_own()
            prompt.apart.update(group)
            return None
        prompt.layers = None
        prompt.in_slots.update(group)
        return source

    def end(self, sequences: Iterable[Sequence]) -> None:
        """They run no longer; their slots are still as they were."""
        last: tuple[Sequence, HeldPrompt] | None = None
        for sequence in sequences:
            prompt = self._held_by.pop(sequence, None)
            if prompt is None:  # of one token
                continue
            prompt.in_slots.discard(sequence)
            prompt.apart.discard(sequence)
            is_used = bool(prompt.in_slots or prompt.apart)
            if not is_used and self._known.get(sequence.prompt_key) is prompt:
                if last is not None:  # one is kept: nothing is copied of those before
                    del self._known[last[0].prompt_key]
                last = sequence, prompt
        if last is not None:
            self._keep(*last)

    def _keep(self, sequence: Sequence, prompt: HeldPrompt) -> None:
        """The prompt that ``sequence`` was the last to have, instead of the one kept before."""
        if prompt.layers is None:
            prompt.layers = self._cache.read(sequence.row, prompt.length)
        if self._unused is not None:
            del self._known[self._unused]
        self._unused = sequence.prompt_key

    def read_apart(self, sequence: Sequence) -> StatesOfLayers | None:
        """The states that its attention reads beside its slot."""
        prompt = self._held_by.get(sequence)
        return prompt.layers if prompt is not None and sequence in prompt.apart else None

    def forget(self) -> None:
        """None is known any more; who has one keeps it."""
        self._known.clear()
        self._unused = None

    def _states(self, prompt: HeldPrompt) -> Prefilled:
        layers = prompt.layers
        if layers is None:
            layers = self._cache.read(next(iter(prompt.in_slots)).row, prompt.length)
        return Prefilled(layers, 0, prompt.length)
