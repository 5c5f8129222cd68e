"""Which process has what: every layer and every rank once, in megatron-core's order."""

import itertools

import pytest

from easyrl.config import ConfigError
from easyrl.config.parallel import ParallelConfig
from easyrl.engines.megatron.layout import Layout

LAYOUTS = [
    Layout(tensor, pipeline, data, chunks)
    for tensor, pipeline, data, chunks in itertools.product((1, 2, 4), (1, 2, 3), (1, 2), (1, 2))
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_rank_is_in_one_group_and_each_layer_in_one_chunk(layout):
    groups = [rank for data in range(layout.data) for rank in layout.group(data)]
    assert sorted(groups) == list(range(layout.world_size))
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert [layout.rank(p.tensor, p.data, p.stage) for p in places] == list(range(len(places)))
    # tensor ranks are neighbours, stages are farthest apart
    assert [p.tensor for p in places[: layout.tensor]] == list(range(layout.tensor))
    assert [p.stage for p in places] == sorted(p.stage for p in places)
    num_layers = 12
    layers = [
        layer
        for chunk in range(layout.chunks)
        for stage in range(layout.pipeline)
        for layer in layout.layers_of(stage, chunk, num_layers)
    ]
    assert layers == list(range(num_layers))  # in the order in which a row goes through them


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_group_has_one_head_and_one_that_tells(layout):
    for data in range(layout.data):
        places = {rank: layout.place(rank) for rank in layout.group(data)}
        heads = [rank for rank, place in places.items() if place.is_head]
        assert heads == [layout.head(data)] == layout.group(data)[:1]
        assert [r for r, place in places.items() if place.tells] == [layout.teller(data)]
        ranks = places[heads[0]].ranks
        assert (ranks.dp_rank, ranks.dp_size, ranks.rank) == (data, layout.data, heads[0])
        assert ranks.heads == tuple(map(layout.head, range(layout.data)))


def test_uneven_stages():
    layout = Layout(pipeline=3, layers_per_stage=(1, 4, 2))
    assert [list(layout.layers_of(s, 0, 7)) for s in range(3)] == [[0], [1, 2, 3, 4], [5, 6]]
    assert [layout.stage_of(layer, 7) for layer in range(7)] == [0, 1, 1, 1, 1, 2, 2]


def test_the_number_of_processes_has_to_fit():
    parallel = ParallelConfig(tensor=2, pipeline=2)
    assert Layout.of(parallel, 8) == Layout(tensor=2, pipeline=2, data=2)
    for wrong in (1, 2, 6):
        with pytest.raises(ConfigError, match="parallel.tensor: 4 processes share one copy"):
            Layout.of(parallel, wrong)
    with pytest.raises(ConfigError, match="parallel.pipeline: 3 processes"):
        Layout.of(ParallelConfig(pipeline=3), 4)


@pytest.mark.parametrize(
    ("layout", "is_open"),
    [
        (Layout(pipeline=2), True),
        (Layout(pipeline=2, schedule="flush"), False),
        (Layout(pipeline=2, chunks=2), False),  # auto
        (Layout(tensor=2), False),
    ],
)
def test_rows_enter_a_pipeline_of_one_chunk_a_stage_one_by_one(
    layout: Layout, is_open: bool
) -> None:
    assert layout.is_open_schedule == is_open
