"""``docs/configuration.md`` is what the sources say, of every key."""

from __future__ import annotations

from pathlib import Path

import pytest

from easyrl.config.reference import Key, keys, markdown

ROOT = Path(__file__).parents[3]
BY_PATH = {key.path: key for key in keys()}


def test_the_document_is_up_to_date() -> None:
    written = (ROOT / "docs/configuration.md").read_text()
    command = "python -m easyrl.config.reference > docs/configuration.md"
    assert markdown() == written, f"run {command}"


def test_every_key_says_what_it_means() -> None:
    assert len(BY_PATH) > 150
    assert [path for path, key in BY_PATH.items() if not key.meaning] == []


@pytest.mark.parametrize(
    ("path", "type_", "default"),
    [
        ("trainer.learning_rate", "number > 0", "`1e-06`"),
        ("trainer.zero_stage", "`0`, `1`, `2`, `3`", "`2`"),
        ("trainer.max_steps", "integer > 0 or null", ""),
        ("rollout.top_p", "number > 0 ≤ 1", "`1.0`"),
        ("data.files", "list of path", "`[]`"),
        ("rewards[].weight", "number", "`1.0`"),
        ("inference.endpoints[].url", "text", "required"),
        ("run.console", "true, false", "`true`"),
        ("scoring.shuffle_rewards", "true, false or `across_prompts`", "`false`"),
    ],
)
def test_a_key(path: str, type_: str, default: str) -> None:
    key: Key = BY_PATH[path]
    assert (key.type, key.default) == (type_, default)


def test_the_lines_below_a_key_are_part_of_its_meaning_and_not_of_the_next_ones() -> None:
    assert BY_PATH["run.determinism"].meaning.endswith("do not depend on batching")
    assert "batching" not in BY_PATH["run.trackers"].meaning
    assert BY_PATH["samples.per_step"].meaning.endswith("0: none")  # above it


def test_who_reads_a_key() -> None:
    assert "easyrl/build/steps.py" in BY_PATH["trainer.max_draws_per_batch"].readers
