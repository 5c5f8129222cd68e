"""``easyrl recipes``: the list names everything, and what is printed of one can be pasted."""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest
import yaml
from omegaconf import OmegaConf
from typer.testing import CliRunner

from easyrl.__main__ import command_line
from easyrl.config.file import resolve_config
from easyrl.config.presets import preset_names, read_preset
from easyrl.recipes.loading import BUILT_IN, load_recipe
from tests.recipes import REQUIRED

NAMES = list(dict.fromkeys([*BUILT_IN, *preset_names()]))
OTHERS = """
model: {path: models/tiny}
data: {files: [train.jsonl]}
inference: {endpoints: ["http://127.0.0.1:8000"]}
rewards: [{name: exact}]
"""
OF_RECORDS = """
source: records
model: {path: models/tiny}
data: {files: [train.jsonl], format: FORMAT}
"""
# a commented line of a configuration; prose has spaces before its colon
LEFT_OUT = re.compile(r"^( *)# ( *\w+:( |$).*)", re.MULTILINE)


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(command_line(), ["recipes", *arguments])
    assert result.exit_code == status, result.output
    return result.output


def test_the_list_has_a_row_for_every_name() -> None:
    rows = [line.split("│")[1:-1] for line in run().splitlines() if line.startswith("│")]
    shown = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows}
    assert list(shown) == NAMES
    for name, (kind, trains, summary, source) in shown.items():
        assert summary and re.search(r"arXiv \d{4}\.\d{5}", source), name
        algorithm = read_preset(name).algorithm if name in preset_names() else name
        assert ("preset" in kind) == (name in preset_names())
        recipe = BUILT_IN[algorithm]()
        streams = "whole batch" if recipe.scope == "batch" else "streams"
        assert trains == ("records" if recipe.source == "records" else streams)
    assert shown["intellect2"][0] == "preset of two_sided"
    assert shown["dapo"][0] == "recipe, preset" and shown["cispo"][0] == "recipe"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_printed_of_one_is_the_configuration_that_its_name_gives(name: str) -> None:
    others = OmegaConf.create(OTHERS)
    if name in BUILT_IN and BUILT_IN[name].source == "records":
        pairs = BUILT_IN[name].pairs
        others = OmegaConf.create(
            OF_RECORDS.replace("FORMAT", "preference" if pairs else "completion")
        )
    required = {"recipe": REQUIRED.get(name, {})}
    pasted = OmegaConf.merge(others, OmegaConf.create(run(name)), required)
    named = OmegaConf.merge(others, {"recipe": {"name": name}}, required)
    one, other = (resolve_config(tree, "pasted") for tree in (pasted, named))
    assert load_recipe(one) == load_recipe(other)
    assert one.model_dump(exclude={"recipe"}) == other.model_dump(exclude={"recipe"})
    assert yaml.safe_load(run(name))["recipe"].keys() == {"name", *asdict(load_recipe(one))}


@pytest.mark.parametrize("name", preset_names())
def test_the_lines_left_out_are_the_published_size(name: str) -> None:
    tree = OmegaConf.to_container(OmegaConf.create(LEFT_OUT.sub(r"\1\2", run(name))))
    for path, published in read_preset(name).size_and_task.items():
        here = tree
        for key in path.split("."):
            here = here[key]
        assert here == published.value


def test_each_line_has_its_source_and_another_default() -> None:
    lines = run("intellect2").splitlines()
    assert "  learning_rate: 3.0e-07  # §4.1; default 1.0e-06" in lines
    assert "  # updates_per_batch: 8  # §4.1; default 1" in lines
    assert "  kl_estimator: k3  # default" in lines
    for name in preset_names():
        shown = run(name)
        preset = read_preset(name)
        for published in [*preset.settings.values(), *preset.size_and_task.values()]:
            assert f"  # {published.source}" in shown
        assert all(each in shown for each in (*preset.not_stated, *preset.differences))


def test_an_unknown_name_ends_with_status_2_and_suggests() -> None:
    result = CliRunner().invoke(command_line(), ["recipes", "intelect2"])
    assert result.exit_code == 2
    assert "no built-in recipe is called 'intelect2'; did you mean 'intellect2'" in result.stderr
