"""``easyrl convert``: what it writes, says and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from easyrl.__main__ import command_line
from easyrl.config.file import load_config

SAID = {"per_device_train_batch_size": 16, "num_generations": 8, "num_iterations": 2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo.json").write_text(json.dumps(SAID))
    (tmp_path / "rewards.py").write_text("def good(completions, **kwargs): return [0.0]\n")
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command_line(), ["convert", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_file_is_written_with_what_was_said_at_its_head(folder: Path) -> None:
    options = ["--model", "models/m", "--data", "a.jsonl", "--data", "b.jsonl"]
    options += ["--reward", "rewards.py:good", "--world-size", "4"]
    status, said = run("grpo.json", *options)
    assert status == 0, said
    config = load_config(folder / "easyrl.yaml")
    assert config.trainer.batch_size == 8 and str(config.model.path) == "models/m"
    assert [str(file) for file in config.data.files] == ["a.jsonl", "b.jsonl"]
    assert [reward.label for reward in config.rewards] == ["good"]
    first = said.splitlines()[0]
    assert first.startswith("num_iterations=2: a response is trained once")
    assert f"# - {first}" in (folder / "easyrl.yaml").read_text()
    assert said.splitlines()[-1].startswith("easyrl.yaml is written, of TRL's GRPOConfig")


def test_nothing_is_overwritten(folder: Path) -> None:
    (folder / "easyrl.yaml").write_text("mine")
    status, said = run("grpo.json")
    assert status == 2 and "easyrl.yaml exists; remove it, or name another file" in said
    assert (folder / "easyrl.yaml").read_text() == "mine"
    assert run("grpo.json", "--out", "other.yaml")[0] == 0


@pytest.mark.parametrize(
    ("name", "text", "options", "error"),
    [
        ("none.json", None, [], "none.json does not exist"),
        ("cut.json", '{"beta": 0.1,', [], "cut.json: line 1 is no JSON"),
        ("list.json", "[1, 2]", [], "list.json: has no keys"),
        ("other.json", '{"lr": 1}', [], "neither clearly TRL's nor verl's (lr); say which"),
        ("other.json", '{"lr": 1}', ["--from", "verl"], "has no key of verl, but lr"),
        ("bad.yaml", "a: [1", [], "bad.yaml"),
        ("run.sh", "python a.b=1 'data.x=2", [], "run.sh: cannot be read as a shell does"),
        ("run.sh", "data.shuffle=[1", [], "run.sh: data.shuffle: '[1' is no value"),
        ("twice.yaml", "data.a: 1\ndata.a.b: 2", [], "twice.yaml: data.a.b: a has a value already"),
        ("grpo.json", None, ["--from", "openrlhf"], "openrlhf is none of trl, verl"),
        ("grpo.json", None, ["--reward", "rewards.py"], "is not FILE:FUNCTION"),
        ("grpo.json", None, ["--reward", "no.py:f"], "no.py does not exist"),
        ("odd.json", '{"beta": 0.1, "num_generations": 3}', [], "num_generations: 3 does not"),
    ],
)
def test_mistakes_are_one_message_with_the_place(
    folder: Path, name: str, text: str | None, options: list[str], error: str
) -> None:
    if text is not None:
        (folder / name).write_text(text)
    status, said = run(name, *options)
    assert status == 2 and error in said and "Traceback" not in said
    assert len(said.splitlines()) <= 5 and not (folder / "easyrl.yaml").exists()
