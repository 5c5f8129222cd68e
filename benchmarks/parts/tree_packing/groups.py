"""What ``benchmarks.tree_packing`` packs: groups with planted beginnings in common.

Shape legend: P prompt tokens, G responses, R tokens of a response.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.parts.made_up_group import made_up_group
from easyrl.schema import RolloutGroup


@dataclass(frozen=True)
class Planted:
    """``groups`` groups with a planted tree.

    The first half of a response is common to ``siblings`` responses of its group, the first
    ``system`` tokens of a prompt are common to all groups.
    """

    shared: str  # in words
    P: int
    G: int
    R: int
    siblings: int = 1
    groups: int = 1
    system: int = 0

    def tokens(self, *, tree: bool) -> int:
        """That go through the model, all groups together in a row."""
        if not tree:
            return self.groups * (self.P + self.G * self.R)
        common = self.R // 2 if self.siblings > 1 else 0
        halves = -(-self.G // self.siblings) * common
        group = self.P - self.system + halves + self.G * (self.R - common)
        return self.system + self.groups * group


CASES = (
    Planted("all 8 share half", 256, 8, 512, siblings=8),
    Planted("pairs share half", 256, 8, 512, siblings=2),
    Planted("all 8 share half", 512, 8, 128, siblings=8),
    Planted("system prompt of 4 groups", 512, 4, 128, groups=4, system=384),
    Planted("system prompt, all 4 share half", 512, 4, 128, siblings=4, groups=4, system=384),
    Planted("nothing", 256, 8, 256),
)


def planted_groups(case: Planted, vocab_size: int, seed: int = 0) -> list[RolloutGroup]:
    """Random tokens, every response token trained; ``case.siblings`` neighbours are siblings.

    Tokens behind a planted beginning differ from sequence to sequence, so nothing else is shared.
    """
    rng = np.random.default_rng(seed)
    system = _random(rng, case.system, vocab_size)
    groups = []
    for index in range(case.groups):
        prompt = np.concatenate([system, _random(rng, case.P - case.system, vocab_size, index)])
        responses: list[np.ndarray] = []
        for sample in range(case.G):
            response = _random(rng, case.R, vocab_size, sample)
            if sample % case.siblings:
                response[: case.R // 2] = responses[-1][: case.R // 2]
                response[case.R // 2] = sample
            elif case.siblings > 1:
                response[case.R // 2] = sample
            responses.append(response)
        groups.append(made_up_group(index, prompt, responses))
    return groups


def _random(
    rng: np.random.Generator, length: int, vocab_size: int, first: int | None = None
) -> np.ndarray:
    """int32 [length], beginning with ``first`` if given."""
    tokens = rng.integers(0, vocab_size, length, dtype=np.int32)
    if first is not None:
        tokens[:1] = first
    return tokens
