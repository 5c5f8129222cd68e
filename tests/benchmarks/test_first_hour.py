"""``benchmarks.first_hour``: its mistakes, what it counts, and when that is as expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.first_hour import _as_expected, _measured
from benchmarks.parts.bad_input.rule import Outcome
from benchmarks.parts.bad_input.scene import Scene
from benchmarks.parts.first_hour.mistakes import MISTAKES

GOOD_START = """\
easyrl up: 1 embedded server, 1 training process, into runs/easyrl; Ctrl-C ends all
easyrl: processes and folder 0.1 s
easyrl: endpoints … 5 s so far
http://127.0.0.1:17938 answers
easyrl: 8 prompts; a batch has 4 prompts x 2 responses, at most 1,600 response tokens
easyrl: 1 step (trainer.max_steps), 12.5 epochs
"""


def test_there_are_twenty_and_every_way_to_start_has_some() -> None:
    titles = [mistake.title for mistake in MISTAKES]
    assert len(set(titles)) == len(titles) >= 20
    assert {title.partition(":")[0] for title in titles} == {"train", "up", "train_policy"}


@pytest.mark.parametrize(
    "text, seconds, lines, is_good",
    [
        ("easyrl: model.path: qwen is no folder; download it\n", 0.5, 1, True),
        ("easyrl: model.path: qwen is no folder; download it\n", 5.5, 1, False),
        ("easyrl: model: qwen is no folder; download it\n", 0.5, 1, False),
        ("a\n" * 5 + "easyrl: model.path: qwen is no folder; download it\n", 0.5, 6, False),
        ("easyrl: model.path: qwen is no folder\n", 0.5, 1, False),
    ],
)
def test_what_is_counted(
    tmp_path: Path, text: str, seconds: float, lines: int, is_good: bool
) -> None:
    (mistake,) = [m for m in MISTAKES if m.title == "train: a model folder that is missing"]
    outcome = Outcome(2, GOOD_START + text, seconds)
    told = _measured(mistake, Scene(tmp_path, tmp_path, {}), outcome)
    assert (told["seconds"], told["lines"]) == (seconds, lines)
    assert _as_expected(told) is is_good


def test_every_mistake_is_made_in_a_folder_of_its_own(tmp_path: Path) -> None:
    urls = {name: "http://127.0.0.1:9" for name in ("good", "closed", "other-model")}
    for number, mistake in enumerate(MISTAKES):
        scene = Scene(tmp_path / str(number), tmp_path / "model", urls)
        argv = scene.set_up(mistake)
        assert argv[0] in ("train", "up", "python") and Path(argv[1]).is_file()
        assert "{" + "folder}" not in Path(argv[1]).read_text()
