"""What a layout derives from its segments, against the dense mask counted pair by pair."""

from __future__ import annotations

import pytest
import torch

from easyrl.kernels.attention.block_partition import partition
from easyrl.kernels.attention.segment_layout import SegmentLayout
from tests.kernels.forests import FORESTS, Triples, random_forest

CPU = torch.device("cpu")
ALL: dict[str, Triples] = FORESTS | {
    f"random {seed}": random_forest(seed, num_segments=14, longest=9) for seed in range(4)
}


@pytest.mark.parametrize("forest", ALL)
@pytest.mark.parametrize("longest", [None, 1, 2, 3, 8])
@pytest.mark.parametrize("most_queries", [None, 5])
def test_blocks_hold_every_visible_pair_once(
    forest: str, longest: int | None, most_queries: int | None
) -> None:
    layout = SegmentLayout(ALL[forest])
    size = layout.num_tokens
    seen = torch.zeros(size, size, dtype=torch.int64)
    covered = torch.zeros(size, dtype=torch.int64)
    rectangles_began = False
    for queries, keys, causal in partition(layout, longest, most_queries):
        assert queries.number == keys.number
        assert queries.number == 1 or min(queries.step, keys.step) >= 1
        for i in range(queries.number):
            rows = slice(queries.start + i * queries.step, None)
            columns = slice(keys.start + i * keys.step, None)
            block = seen[rows, columns][: queries.length, : keys.length]
            assert block.shape == (queries.length, keys.length)
            block += torch.ones_like(block).tril() if causal else 1
            if causal:
                assert queries == keys and not rectangles_began
                assert longest is None or queries.length <= longest
                covered[rows][: queries.length] += 1
            else:
                rectangles_began = True
                assert most_queries is None or queries.length <= most_queries
        if most_queries is not None and queries.number > 1:
            assert queries.number * queries.length <= most_queries
    assert torch.equal(seen, layout.dense_mask(CPU).long())
    assert (covered == 1).all()
    assert layout.num_pairs == int(seen.sum())
    derived = [layout.derived(partition, longest, most_queries) for _ in range(2)]
    assert derived[0] is derived[1]


@pytest.mark.parametrize("forest", ALL)
@pytest.mark.parametrize("longest", [None, 1, 4])
def test_stretches_of_a_batch_do_not_overlap(forest: str, longest: int | None) -> None:
    """Sums are formed in place over each batch."""
    for queries, keys, _ in partition(SegmentLayout(ALL[forest]), longest):
        for span in (queries, keys):
            assert span.number == 1 or span.step >= span.length


def test_equal_responses_are_one_batch() -> None:
    layout = SegmentLayout([(0, 100, -1), *((100 + 8 * i, 8, 0) for i in range(5))])
    assert [(q.number, q.length, k.length, c) for q, k, c in partition(layout)] == [
        (1, 100, 100, True),
        (5, 8, 8, True),
        (1, 40, 100, False),
    ]
    halved = [(q.number, q.length, k.length, c) for q, k, c in partition(layout, 25)]
    assert halved == [
        (4, 25, 25, True),
        (5, 8, 8, True),
        (1, 40, 100, False),
        (1, 50, 50, False),
        (2, 25, 25, False),
    ]
    cut = [(q.start, q.number, q.length, k.length, c) for q, k, c in partition(layout, None, 20)]
    assert cut == [
        (0, 1, 100, 100, True),
        (100, 2, 8, 8, True),
        (116, 2, 8, 8, True),
        (132, 1, 8, 8, True),
        (100, 1, 20, 100, False),
        (120, 1, 20, 100, False),
    ]


@pytest.mark.parametrize("forest", ALL)
def test_paths_are_what_each_segment_sees(forest: str) -> None:
    layout = SegmentLayout(ALL[forest])
    (paths,) = layout.paths(CPU)
    mask = layout.dense_mask(CPU)
    keys = torch.tensor_split(paths.key_index, paths.key_ends[:-1])
    for (start, length, _), path in zip(layout.segments, keys, strict=True):
        assert path.tolist() == mask[start + length - 1].nonzero().squeeze(1).tolist()
    assert paths.query_ends == tuple(s + n for s, n, _ in layout.segments)
    assert paths.key_ends[-1] == len(paths.key_index)
    assert paths.max_query == max(n for _, n, _ in layout.segments)
    assert paths.max_key == max(len(path) for path in keys)
    assert layout.paths(CPU)[0] is paths
