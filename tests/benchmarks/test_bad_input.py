"""The kinds of mistakes are many and different; one of each way is made and judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.bad_input import AREAS
from benchmarks.parts.bad_input.scene import Mistake, Scene
from easyrl.config.file import load_config

ROOT = Path(__file__).resolve().parents[2]


def test_there_are_many_kinds_of_each_area_and_no_two_are_the_same():
    assert set(AREAS) == {"config", "data", "rewards", "recipes", "models", "paths", "endpoints"}
    for area, mistakes in AREAS.items():
        assert len(mistakes) >= 15, area
        titles = Counter(mistake.title for mistake in mistakes)
        assert max(titles.values()) == 1, titles.most_common(1)
    made = Counter(
        (m.overrides, m.config, *sorted(m.files.items()), m.command, m.prepare, *m.environment)
        for mistakes in AREAS.values()
        for m in mistakes
    )
    assert max(made.values()) == 1, made.most_common(1)
    assert sum(map(len, AREAS.values())) >= 100


def test_what_the_mistakes_are_made_in_is_good(tmp_path):
    scene = Scene(tmp_path / "kind", tmp_path / "model", {"good": "http://127.0.0.1:1"})
    command = scene.set_up(Mistake("none", "run"))
    assert command == ["train", str(tmp_path / "kind" / "config.yaml")]
    config = load_config(command[1])
    assert config.run.output_dir == tmp_path / "kind" / "run"
    assert len((tmp_path / "kind" / "prompts.jsonl").read_text().splitlines()) == 8


@pytest.mark.runs
def test_one_kind_of_each_way_is_judged():
    command = [sys.executable, "-m", "benchmarks.bad_input", "--only", "an import that is missing"]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300
    )
    last = json.loads(result.stdout.splitlines()[-1])
    assert last == {"kinds": 2, "unclear": 0, "slow": 0, "tracebacks": 0}, result.stdout
    assert result.returncode == 0
