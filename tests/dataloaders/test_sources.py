"""Records of a dataset that ``datasets`` loads, as those of files; what is wrong is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from easyrl.config import DatasetConfig
from easyrl.dataloaders.prompts.sources import source_records

datasets = pytest.importorskip("datasets")
ROWS = [{"question": f"{n} + 1 =", "answer": str(n + 1), "level": n % 3} for n in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a dataset's repository is laid out, with two subsets and a test split."""
    folder = tmp_path_factory.mktemp("dataset")
    for subset, rows in (("main", ROWS), ("other", ROWS[:3])):
        (folder / subset).mkdir()
        for split, part in (("train", rows), ("test", rows[:2])):
            lines = [json.dumps(row) for row in part]
            (folder / subset / f"{split}.jsonl").write_text("\n".join(lines))
    configs = [{"config_name": name, "data_files": [{"split": s, "path": f"{name}/{s}.jsonl"}
                for s in ("train", "test")]} for name in ("main", "other")]  # fmt: skip
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def records(folder: Path, **settings: Any) -> list[Any]:
    config = DatasetConfig(dataset=str(folder), **{"subset": "main", **settings})
    return list(source_records(config))


def test_a_split_is_read_in_its_order(folder: Path) -> None:
    found = records(folder)
    assert [dict(record.values) for record in found] == ROWS
    assert found[4].location == f"{folder}:train row 5"
    assert len(records(folder, subset="other")) == 3 and len(records(folder, split="test")) == 2
    assert [r.values["answer"] for r in records(folder, split="train[2:4]")] == ["3", "4"]
    assert len(records(folder, max_records=4)) == 4


def test_a_stream_is_read_as_far_as_it_is_asked_for(folder: Path) -> None:
    found = records(folder, streaming=True, max_records=3)
    assert [dict(record.values) for record in found] == ROWS[:3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "validation"}, "split 'validation', cannot be loaded"),
        ({"subset": "third"}, "cannot be loaded .*third"),
    ],
)
def test_what_it_does_not_have_is_named(folder: Path, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^dataset: .*{message}") as caught:
        records(folder, **settings)
    assert "correct dataset, subset or split" in str(caught.value)


def test_one_that_is_not_to_be_had_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody listens there; the Hub is asked once."""
    asked = []

    def info(api: HfApi, name: str, **_: object) -> None:
        asked.append(name)
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(HfApi, "dataset_info", info)
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    with pytest.raises(ValueError, match="hf download some-lab/sums --repo-type dataset"):
        list(source_records(DatasetConfig(dataset="some-lab/sums")))
    assert asked == ["some-lab/sums"]
    assert (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE) == before


def test_without_the_package_the_remedy_is_named() -> None:
    code = (
        "import sys; sys.modules['datasets'] = None; from easyrl.config import DatasetConfig; "
        "from easyrl.dataloaders.prompts.sources import source_records; "
        "list(source_records(DatasetConfig(dataset='a/b')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'easyrl[hub]'" in result.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "files: is empty"),
        ({"files": ["a.jsonl"], "dataset": "a/b"}, "files: dataset is given too"),
        ({"files": ["a.jsonl"], "split": "test"}, "split: has no effect with files"),
        ({"files": ["a.jsonl"], "subset": "main"}, "subset: has no effect with files"),
        ({"dataset": "a/b", "streaming": True}, "streaming: needs max_records"),
    ],
)
def test_settings_that_do_not_go_together(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DatasetConfig(**settings)
