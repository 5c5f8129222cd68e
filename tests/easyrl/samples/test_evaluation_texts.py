"""Texts of an evaluation: a line per prompt, and a file that is whole or not there."""

import gzip
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from easyrl.samples.texts import TextFile, TextsNotWritten
from easyrl.schema import Exclusion
from tests.easyrl.samples.sample_groups import trained


def decode(token_ids):
    return " ".join(map(str, token_ids))


@pytest.mark.parametrize("name", ["texts.jsonl", "texts.jsonl.gz"])
def test_a_line_has_what_was_asked_answered_and_scored(tmp_path, name):
    file = tmp_path / name
    group = trained(3, [0.0, 1.0], cut_off=[1], answer="42", location="a:7").group
    nobody = replace(trained(4, []).group, excluded=Exclusion("refused", "400: no"), position=1)
    with closing(TextFile(file, decode)) as texts:
        texts.add("", group)
        texts.add("aime24", nobody)
        assert not file.exists()
        texts.finish()
    content = file.read_bytes()
    lines = (gzip.decompress(content) if name.endswith("gz") else content).splitlines()
    first, second = map(json.loads, lines)
    one, other = first.pop("responses")
    assert first == {
        "index": 3,
        "location": "a:7",
        "prompt": "100 3",
        "answer": "42",
        "excluded": None,
    }
    assert (one["text"], one["reward"], one["truncated"], one["num_tokens"]) == (
        *("3 0 7", 0.0, False, 3),
    )
    assert other["truncated"] and other["components"] == {"exact": 1.0, "format": 1.0}
    assert (second["excluded"], second["responses"]) == ("400: no", [])
    assert second["set"] == "aime24"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_fails_leaves_the_file_that_was_there(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("before")
    with closing(TextFile(file, decode)) as texts:
        texts.add("", trained(3, [0.0]).group)
    assert file.read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def test_a_file_that_cannot_be_written_is_named():
    with pytest.raises(TextsNotWritten, match="--keep-texts: /proc/texts .*name a file in another"):
        TextFile(Path("/proc/texts"), decode)


@pytest.mark.parametrize("name", ["texts.jsonl", "texts.jsonl.gz"])
def test_a_full_disk_is_told_of(tmp_path, name):
    file = tmp_path / name
    (tmp_path / f"{name}.part").symlink_to("/dev/full")
    with closing(TextFile(file, decode)) as texts:
        texts.add("", trained(3, [0.0]).group)
        with pytest.raises(TextsNotWritten, match="No space left on device.*make room"):
            texts.finish()
    assert list(tmp_path.iterdir()) == []
