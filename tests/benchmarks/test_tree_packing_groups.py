"""The planted trees of ``benchmarks.tree_packing`` are what its table says they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.parts.tree_packing.groups import CASES, Planted, planted_groups
from benchmarks.tree_packing import packed_row

SMALL = (
    *CASES,
    Planted("pairs of five", 7, 5, 9, siblings=2),
    Planted("groups of one", 5, 1, 1, groups=3, system=4),
)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.shared}-{case.P}-{case.R}")
def test_tokens_are_those_planted(case: Planted) -> None:
    groups = planted_groups(case, vocab_size=4096)
    assert len(groups) == case.groups
    assert {len(g.prompt.token_ids) for g in groups} == {case.P}
    assert {len(c.token_ids) for g in groups for c in g.completions} == {case.R}
    assert packed_row(groups, "prompt").num_tokens == case.tokens(tree=False)
    assert packed_row(groups, "tree").num_tokens == case.tokens(tree=True)


def test_half_of_the_tokens_are_shared() -> None:
    """With all siblings, the tree has the first half once instead of G times."""
    case = CASES[0]
    assert case.tokens(tree=False) - case.tokens(tree=True) == (case.G - 1) * case.R // 2
    alone = replace(case, siblings=1)
    assert alone.tokens(tree=True) == alone.tokens(tree=False)
