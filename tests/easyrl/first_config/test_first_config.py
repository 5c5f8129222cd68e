"""``easyrl init``: what it asks for, what it refuses, and the file that it writes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.parts.random_model import write_random_model
from easyrl.config import RewardConfig
from easyrl.config.file import load_config
from easyrl.config.machine import check_paths
from easyrl.demo.prepared import DEMO_MODEL, DEMO_PROMPTS, missing_parts
from easyrl.first_config import written
from easyrl.first_config.answers import Answers, Data, check_data, check_devices, check_reward
from easyrl.first_config.questions import Given, answers_of

RECORDS = [{"question": f"{n}+1", "solution": str(n + 1), "level": n} for n in range(5)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def data(here: Path) -> Path:
    file = here / "mine.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return file


def asked(monkeypatch: pytest.MonkeyPatch, *said: str, devices: int = 0) -> tuple[Answers, str]:
    """The answers, and what was printed, of somebody who types ``said``."""
    lines = iter(said)
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    monkeypatch.setattr(
        console, "input", lambda prompt="", **_: console.print(prompt) or next(lines)
    )
    return answers_of(Given(), lambda: devices, console), shown.getvalue()


def test_defaults_are_the_demos_and_its_missing_parts_are_known(here: Path) -> None:
    answers = answers_of(Given(), lambda: 0, None)
    Path("first.yaml").write_text(written.written(answers, Path("first.yaml")))
    config = load_config("first.yaml")
    assert config.model.path == DEMO_MODEL and config.data.files == [DEMO_PROMPTS]
    assert config.run.output_dir == Path("runs/first")
    assert config.samples.console_every > 0 and config.trainer.num_devices == 1
    assert config.evaluation is not None
    named = [config.model.path, *config.data.files, *config.evaluation.data.files]
    missing = missing_parts(named)
    assert missing == named
    check_paths(config, written_later=missing)
    with pytest.raises(ValueError, match=r"model.path: models/demo is not a directory"):
        check_paths(config)


def test_a_bad_answer_is_asked_for_again(here, data, monkeypatch) -> None:
    model = write_random_model(here / "model", hidden_size=32, num_layers=1)
    (here / "empty.jsonl").write_text("\n\n")
    answers, shown = asked(
        monkeypatch,
        *("nowhere", str(model)),
        *("nowhere.jsonl", "empty.jsonl", str(data)),
        *("exactly", "exact"),
        *("none", "0", "2"),
        "1",
    )
    assert answers.model == model and answers.reward == RewardConfig(name="exact")
    assert answers.data.file == data and answers.data.num_records == len(RECORDS)
    assert (answers.data.prompt_field, answers.data.answer_field) == ("question", "solution")
    assert (answers.inference_devices, answers.training_devices) == (2, 1)
    for refusal in (
        "nowhere is not a directory, nor a model's name on the Hugging Face Hub",
        "nowhere.jsonl: does not exist",
        "empty.jsonl: holds no records",
        "'exactly' is no built-in reward; choose one of exact, math",
        "'none' is no number",
        "0 is not possible; give at least 1",
    ):
        assert shown.count(refusal) == 1, shown
    assert shown.count("Model (a folder)") == 2 and shown.count("Data (a file)") == 3


def test_the_file_for_own_data_fits_them(here, data) -> None:
    model = write_random_model(here / "model", hidden_size=32, num_layers=1)
    given = Given(str(model), str(data), "exact", "1", "2")
    text = written.written(answers_of(given, lambda: 0, None), Path("own.yaml"))
    Path("own.yaml").write_text(text)
    config = load_config("own.yaml")
    check_paths(config)
    assert (config.data.fields.prompt, config.data.fields.answer) == ("question", "solution")
    assert config.trainer.batch_size == 4  # of 5 records, by 2 devices
    assert config.trainer.num_devices == 2 and config.evaluation is None


@pytest.mark.parametrize(
    "option, value",
    [
        ("model", "nowhere"),
        ("data", "nowhere.jsonl"),
        ("reward", "exactly"),
        ("inference_devices", "many"),
        ("training_devices", "0"),
    ],
)
def test_a_bad_option_is_named(here: Path, option: str, value: str) -> None:
    name = "--" + option.replace("_", "-")
    with pytest.raises(ValueError, match=f"^{name}: .*{value}"):
        answers_of(Given(**{option: value}), lambda: 0, None)


def test_devices_are_divided_and_no_more_than_there_are(monkeypatch, here) -> None:
    answers = answers_of(Given(), lambda: 8, None)
    assert (answers.inference_devices, answers.training_devices) == (4, 4)
    answers = answers_of(Given(inference_devices="2"), lambda: 8, None)
    assert (answers.inference_devices, answers.training_devices) == (2, 6)
    with pytest.raises(ValueError, match="--training-devices: 7 is not possible.* at most 6"):
        answers_of(Given(inference_devices="2", training_devices="7"), lambda: 8, None)
    with pytest.raises(ValueError, match="at most 7"):
        check_devices("8", 0, 7)


@pytest.mark.parametrize(
    "with_vllm, inference, launch",
    [
        (True, "3", {"engine": "vllm", "count": 3, "devices": None}),
        (False, "3", {"engine": "embedded", "count": 3, "devices": [[0], [1], [2]]}),
        (True, "0", {"engine": "embedded", "count": 1, "devices": None}),
    ],
)
def test_servers_on_devices(here, monkeypatch, with_vllm, inference, launch) -> None:
    if with_vllm:
        python = here / written.VLLM_PYTHON
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\n")
    answers = answers_of(Given(inference_devices=inference), lambda: 4, None)
    Path("gpu.yaml").write_text(written.written(answers, Path("gpu.yaml")))
    config = load_config("gpu.yaml")
    assert config.model.dtype == "bf16" and config.inference.launch is not None
    dumped = config.inference.launch.model_dump()
    assert {key: dumped[key] for key in launch} == launch


def test_a_reward_of_ones_own_is_loaded_and_tried(here, data) -> None:
    (here / "reward.py").write_text(
        "def by_level(completions, level, **columns):\n    return [0.0 for _ in completions]\n"
        "def by_age(completions, age):\n    return [0.0 for _ in completions]\n"
    )
    reward = check_reward("reward.py:by_level", check_data(str(data)))
    assert reward.function == "by_level" and reward.label == "by_level"
    with pytest.raises(ValueError, match="age"):
        check_reward("reward.py:by_age", check_data(str(data)))
    with pytest.raises(ValueError, match="does not exist"):
        check_reward("rewards.py:by_level", check_data(str(data)))
    with pytest.raises(ValueError, match="has no function.*by_height|by_height"):
        check_reward("reward.py:by_height", check_data(str(data)))


def test_a_reward_that_needs_answers_is_refused_without_any(here) -> None:
    file = here / "prompts.jsonl"
    file.write_text('{"prompt": "1+1"}\n')
    data = check_data(str(file))
    assert data.answer_field is None
    with pytest.raises(ValueError, match="answer"):
        check_reward("exact", data)
    assert check_reward("format", data).name == "format"


def test_fields_without_a_prompt_are_listed(here) -> None:
    (here / "texts.jsonl").write_text('{"text": "1+1", "id": 3}\n')
    with pytest.raises(ValueError, match=r"texts.jsonl:1 has the fields text, id, none"):
        check_data("texts.jsonl")


@pytest.mark.parametrize("name", ["a b", "yes", "1e3", "x: {y}", 'quote"d', "#c", "plain_1.x"])
def test_names_are_read_back_as_they_are(here, name: str) -> None:
    data = Data(Path(f"{name}.jsonl"), name, None, 8)
    answers = Answers(DEMO_MODEL, data, RewardConfig(name="format"), 1, 1, 0)
    Path("names.yaml").write_text(written.written(answers, Path("names.yaml")))
    config = load_config("names.yaml")
    assert config.data.fields.prompt == name and config.data.fields.answer is None
    assert config.data.files == [Path(f"{name}.jsonl")]
