"""Rows that are prefix trees, against tries written out node by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyrl.dataloaders.packing.prefix_tree import PrefixTree, SharedOrder, lexicographic
from easyrl.dataloaders.packing.row import TrainedSequence, packed_row
from easyrl.schema import MicroBatch, RolloutGroup, SampleKey, Segment
from tests.dataloaders.packed_rows import (
    BUSY,
    expected_tokens,
    pack,
    random_groups,
    sequences_of,
    trained_tokens,
)
from tests.tiny_models import random_group


def trie(sequences: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Nodes, and chains of nodes with one child each, of the tree of all beginnings."""
    nodes = {sequence[:n] for sequence in sequences for n in range(1, len(sequence) + 1)}
    children = Counter(node[:-1] for node in nodes)
    chains = sum(len(node) == 1 or children[node[:-1]] > 1 for node in nodes)
    return len(nodes), chains


def groups_of(*written: tuple[str, list[str]]) -> list[RolloutGroup]:
    """Prompts and responses by letters, one token each."""
    groups = []
    for index, (prompt, responses) in enumerate(written):
        group = random_group(
            np.random.default_rng(index), len(prompt), [len(r) for r in responses], index=index
        )
        for array, text in zip(
            (group.prompt.token_ids, *(c.token_ids for c in group.completions)),
            (prompt, *responses),
            strict=True,
        ):
            array[:] = [ord(letter) for letter in text]
        groups.append(group)
    return groups


def text_of(row: MicroBatch) -> str:
    return "".join(map(chr, row.input_ids.tolist()))


def test_tree_of_one_group() -> None:
    """Responses that are equal, that begin alike, and that are a beginning of another."""
    groups = groups_of(("pp", ["abcd", "abxy", "abcd", "ab", "z"]))
    (row,) = pack(groups, packing="tree")
    assert text_of(row) == "ppabcdxyz"
    assert row.segments == (
        Segment(0, 2, -1),  # pp
        Segment(2, 2, 0),  # ab
        Segment(4, 2, 1),  # cd
        Segment(6, 2, 1),  # xy
        Segment(8, 1, 0),  # z
    )
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 2]
    by_sequence = [
        [1, 2, 3, 4],  # abcd, by pp's last token, a, b, c
        [1, 2, 3, 6],
        [1, 2, 3, 4],
        [1, 2],
        [1],
    ]
    assert row.predictor_index.tolist() == sum(by_sequence, [])
    assert row.sequence_index.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 2 + [4]
    assert row.advantages.tolist() == row.sequence_index.tolist()  # each its own, also where shared
    assert row.sequences == tuple(SampleKey(0, 0, sample) for sample in range(5))


def test_groups_share_what_their_prompts_have_in_common() -> None:
    groups = groups_of(("sys1", ["ab", "ac"]), ("other", ["k"]), ("sys2", ["ab", "c"]))
    (row,) = pack(groups, packing="tree")
    assert text_of(row) == "other" + "k" + "sys" + "1abc" + "2abc"
    assert [s.length for s in row.segments] == [6, 3, 2, 1, 1, 1, 2, 1]
    assert [s.parent for s in row.segments] == [-1, -1, 1, 2, 2, 1, 5, 5]


def test_prompt_that_begins_like_another_with_its_response() -> None:
    """Nothing is where one would look for a prompt's end: it is in the middle of a chain."""
    groups = groups_of(("p", ["qrs"]), ("pqr", ["st"]))
    (row,) = pack(groups, packing="tree")
    assert text_of(row) == "pqrst"
    assert row.segments == (Segment(0, 5, -1),)
    assert row.predictor_index.tolist() == [0, 1, 2, 2, 3]
    assert row.label_ids.tolist() == [ord(letter) for letter in "qrsst"]


@BUSY
@given(random_groups(max_groups=5))
def test_a_row_is_the_smallest_tree_of_its_sequences(groups: list[RolloutGroup]) -> None:
    sequences = sequences_of(groups)
    rows = pack(groups, budget=1000, packing="tree")
    assert len(rows) == bool(sequences)
    for row in rows:
        assert (row.num_tokens, len(row.segments)) == trie(list(sequences.values()))
        (prompt_row,) = pack(groups, budget=1000)
        assert row.num_tokens <= prompt_row.num_tokens


@BUSY
@given(random_groups(max_groups=5), st.integers(1, 60), st.booleans())
def test_several_rows_are_trees_too(
    groups: list[RolloutGroup], budget: int, keep_order: bool
) -> None:
    sequences = sequences_of(groups)
    rows = pack(groups, budget=budget, packing="tree", keep_order=keep_order)
    for row in rows:
        assert (row.num_tokens, len(row.segments)) == trie([sequences[k] for k in row.sequences])
    if not keep_order:
        assert len(rows) <= len(pack(groups, budget=budget, keep_order=False))
    assert sorted(key for row in rows for key in row.sequences) == sorted(sequences)


def test_responses_that_share_long_beginnings_stay_together() -> None:
    a, b = "a" * 20, "b" * 20
    groups = groups_of(("p", [a + "1", b + "1", a + "2", b + "2", a + "3", b + "3"]))
    rows = pack(groups, budget=24, packing="tree")
    assert [[key.sample for key in row.sequences] for row in rows] == [[0, 2, 4], [1, 3, 5]]
    assert [row.num_tokens for row in rows] == [24, 24]


def test_a_group_too_long_with_its_prompt_alone_shared_may_fit_as_a_tree() -> None:
    groups = groups_of(("p", ["abcdefgh" + last for last in "1234"]))
    assert [row.num_tokens for row in pack(groups, budget=20)] == [19, 19]
    assert [row.num_tokens for row in pack(groups, budget=20, packing="tree")] == [13]


def test_rows_are_not_more_where_nothing_is_shared() -> None:
    """Neighbours in the tree would need three rows."""
    groups = groups_of(("p", ["a" * 12, "b" * 12, "c" * 9, "d" * 9]))
    assert [row.num_tokens for row in pack(groups, budget=22, packing="tree")] == [22, 22]


@pytest.mark.parametrize("too_much", [1, -1])
def test_sharing_a_token_more_or_less_is_seen(too_much: int) -> None:
    """The comparison with the groups fails where a tree is wrong, and with it its size."""
    groups = groups_of(("pp", ["abcd", "abxy", "az"]))
    sequences = [
        TrainedSequence(
            SampleKey(0, 0, g), "", np.concatenate([groups[0].prompt.token_ids, c.token_ids]), 2,
            2 + np.arange(len(c.token_ids)), c.logprobs,
            np.full(len(c.token_ids), g), np.ones(len(c.token_ids)),
        )
        for g, c in enumerate(groups[0].completions)
    ]  # fmt: skip
    order = lexicographic([s.token_ids for s in sequences])
    right = packed_row(sequences, order)
    assert trained_tokens([right]) == expected_tokens(groups, "token", False)
    wrong = packed_row(sequences, replace(order, shared=order.shared + [0, too_much, 0]))
    tokens = trained_tokens([wrong])
    if too_much > 0:
        assert tokens != expected_tokens(groups, "token", False)
    else:  # right, and not the smallest
        assert tokens == expected_tokens(groups, "token", False)
    assert wrong.num_tokens == right.num_tokens - too_much


@BUSY
@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=8), min_size=1, max_size=6))
def test_order_and_what_neighbours_share(written: list[list[int]]) -> None:
    """Token ids of one and of two bytes; equal sequences as given."""
    sequences = [np.array(tokens, dtype=np.int32) for tokens in written]
    order = lexicographic(sequences)
    assert [written[i] for i in order.index] == sorted(written)
    assert all(
        a < b
        for a, b in zip(order.index, order.index[1:], strict=False)
        if written[a] == written[b]
    )
    wanted = np.arange(len(written)) % 2 == 0
    part = order.only(wanted)
    assert part.num_tokens == trie([tuple(w) for w in written[::2]])[0]
    assert [written[i] for i in part.index] == sorted(written[::2])


def test_positions_of_sequences_in_a_row() -> None:
    order = SharedOrder(np.array([2, 0, 1]), np.array([3, 4, 3]), np.array([0, 2, 1]))
    tree = PrefixTree(order)  # abc, ab|de, a|fg
    assert tree.positions(0, np.arange(3)).tolist() == [0, 1, 2]
    assert tree.positions(1, np.arange(4)).tolist() == [0, 1, 3, 4]
    assert tree.positions(2, np.arange(3)).tolist() == [0, 5, 6]
    assert tree.depths.tolist() == [0, 1, 2, 2, 3, 1, 2]
