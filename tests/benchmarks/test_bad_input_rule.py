"""The rule tells a clear message from a vague one, whoever wrote it."""

from __future__ import annotations

import pytest

from benchmarks.parts.bad_input.rule import Outcome, message_of, unclear

CLEAR = {
    "a key and the nearest one": (
        "easyrl: run.yaml: 1 problem(s)\n  trainer.batch_sise: unknown; did you mean 'batch_size'?",
        "trainer.batch_sise",
    ),
    "a line and an imperative": (
        "easyrl: data: /tmp/p.jsonl:3: is not JSON; repair the line",
        "/tmp/p.jsonl:3",
    ),
    "what would be right": ("easyrl: run.mode: must be async or sync", "run.mode"),
    "a remedy in brackets": ("easyrl: data.files: no records (give other files)", "data.files"),
    "a usage line": (
        "usage: easyrl replay [-h] --step STEP RUN_DIR\n"
        "easyrl replay: error: the following arguments are required: --step",
        "--step",
    ),
    "warnings before it": (
        "W1\nW2\nW3\nW4\nW5\nW6\nW7\neasyrl: run.name: has a slash; use letters only",
        "run.name",
    ),
}
VAGUE = {
    "no location": ("easyrl: invalid config; correct it", "trainer.batch_size", "does not name"),
    "another location": ("easyrl: run.name: use letters", "trainer.batch_size", "does not name"),
    "a longer key": ("easyrl: trainer.batch_size_x: use 8", "trainer.batch_size", "does not name"),
    "the tail of a key": ("easyrl: other.trainer.seed: use 8", "trainer.seed", "does not name"),
    "another line": ("easyrl: a.py:12: correct it", "a.py:1", "does not name"),
    "only that it is wrong": ("easyrl: run.mode: is invalid", "run.mode", "no remedy"),
    "only that it is needed": ("easyrl: model: is required", "model", "no remedy"),
    "only that it is not there": ("easyrl: a/b does not exist", "a/b", "no remedy"),
    "an imperative as a noun": ("easyrl: data: wrong, use of a list", "data", "no remedy"),
    "a verb in the middle": ("easyrl: data: nobody could use that list", "data", "no remedy"),
    "too long": (f"easyrl: data: use a list {'very ' * 100}", "data", "characters"),
    "above the last six lines": ("easyrl: run.name: x\n" + "a\n" * 5 + "use a", "run.name", "name"),
    "a traceback": (
        "Traceback (most recent call last):\neasyrl: run.name: use letters",
        "run.name",
        "a traceback",
    ),
}


def problems(text: str, location: str, status: int = 2) -> list[str]:
    return unclear(Outcome(status, text, 0.1), [location], 2, "/tmp/folder")


@pytest.mark.parametrize("name", CLEAR)
def test_clear(name):
    assert problems(*CLEAR[name]) == []


@pytest.mark.parametrize("name", VAGUE)
def test_vague(name):
    text, location, problem = VAGUE[name]
    (found,) = problems(text, location)
    assert problem in found


@pytest.mark.parametrize("status", [0, 1, 137])
def test_another_status_than_the_documented_one(status):
    assert problems("easyrl: run.name: use letters", "run.name", status) == [
        f"exit status {status}, documented is 2"
    ]


def test_every_location_has_to_be_named():
    outcome = Outcome(2, "easyrl: run.output_dir: use another folder", 0.1)
    assert unclear(outcome, ["run.output_dir", "/x/run"], 2, "/x") == ["does not name …/run"]


def test_the_temporary_folders_name_does_not_count_as_length():
    folder = "/tmp/" + "f" * 300
    text = f"easyrl: model.path: {folder}/m is empty, {folder}/m; give another folder"
    assert unclear(Outcome(2, text, 0.1), ["model.path"], 2, folder) == []


def test_a_message_begins_with_its_prefix():
    assert message_of("a warning\n\neasyrl: what\n  more\n") == "easyrl: what\n  more"
    assert message_of("a\nb\n") == "a\nb"
