"""Short names of layouts become keys and a number of processes."""

import pytest

from easyrl.demo.layouts import named_layout


@pytest.mark.parametrize(
    ("name", "num_processes", "overrides"),
    [
        ("tp2pp2", 4, {"tensor=2", "pipeline=2", "zero_stage=1"}),
        ("tp2dp2", 4, {"tensor=2", "pipeline=1", "zero_stage=2"}),
        ("tp2sppp2dp3", 12, {"tensor=2", "sequence=true", "pipeline=2", "zero_stage=1"}),
        ("pp4", 4, {"tensor=1", "pipeline=4", "zero_stage=1"}),
        ("dp2", 2, {"tensor=1", "pipeline=1", "zero_stage=1"}),
    ],
)
def test_a_name_says_how_the_model_is_split(name, num_processes, overrides):
    layout = named_layout(name)
    assert layout.num_processes == num_processes
    assert {each.partition(".")[2] for each in layout.overrides} == overrides


@pytest.mark.parametrize("name", ["", "2tp", "pp2tp2", "tp0", "tp", "tp2-pp2", "sp2"])
def test_another_form_is_refused_with_examples(name):
    with pytest.raises(ValueError, match="write for instance tp2pp2"):
        named_layout(name)
