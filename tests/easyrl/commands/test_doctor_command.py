"""``easyrl doctor``: what it prints, and its exit status."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.parts.random_model import write_random_model
from easyrl.__main__ import command_line
from tests.easyrl.doctor.parts import NOWHERE, serve, settings, write_records


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    made = write_random_model(folder / "model", hidden_size=64, num_layers=2)
    write_records(made)
    return made


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    with serve(model) as url:
        yield url


def run(model: Path, url: str, *arguments: str, status: int = 0, **sections: Any) -> str:
    file = model.parent / "config.yaml"
    file.write_text(json.dumps(settings(model, url, **sections)))  # JSON is YAML
    result = CliRunner().invoke(command_line(), ["doctor", str(file), *arguments])
    assert result.exit_code == status, result.output
    return result.stderr if status == 2 else result.stdout


def test_a_run_that_may_begin(model: Path, server: str) -> None:
    lines = run(model, server).splitlines()
    assert lines[-1].endswith(" ok, 0 failed, 0 not checked")
    checks = [line for line in lines if line.startswith("✓ ")]
    assert int(lines[-1].split()[0]) == len(checks) == len(lines) - 1
    for name in ("python", "model", "memory of the host", "disk space", "space for weight sync",
                 "data", "batches", "rewards", f"endpoint {server}", f"architecture of {server}",
                 f"context of {server}", f"tokenizer of {server}", f"chat template of {server}",
                 f"weight transfer to {server}", f"log-probabilities of {server}"):  # fmt: skip
        assert any(line.startswith(f"✓ {name}: ") for line in checks), name
    assert not (model.parent / "run").exists()  # nothing is written


def test_as_json(model: Path, server: str) -> None:
    told = json.loads(run(model, server, "--json", "rollout.max_tokens=40000", status=1))
    assert told.keys() == {"ok", "findings"} and told["ok"] is False
    assert all(f.keys() == {"name", "verdict", "seen", "remedy"} for f in told["findings"])
    (failed,) = (f for f in told["findings"] if f["verdict"] == "failed")
    assert failed["name"] == f"context of {server}" and failed["remedy"]
    assert json.loads(run(model, server, "--json"))["ok"] is True


def test_a_failure_has_its_remedy_in_the_next_line(model: Path) -> None:
    lines = run(model, NOWHERE, status=1).splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"✗ endpoint {NOWHERE}: "))
    assert lines[place + 1].startswith("    → start the server")
    assert "1 failed" in lines[-1]


def test_a_full_disk(model: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    lines = run(model, server, status=1).splitlines()
    failed = [line.split(":")[0] for line in lines if line.startswith("✗ ")]
    assert failed == ["✗ disk space", "✗ space for weight sync"]


def test_a_broken_file_of_records_fails_no_other_check(model: Path, server: str) -> None:
    broken = model.parent / "broken.jsonl"
    broken.write_text("{")
    told = json.loads(run(model, server, "--json", f"data.files=[{broken}]", status=1))
    by_name = {finding["name"]: finding for finding in told["findings"]}
    assert by_name["data"]["verdict"] == "failed" and str(broken) in by_name["data"]["seen"]
    assert by_name["disk space"]["verdict"] == "ok"
    assert by_name["endpoints"]["verdict"] == "not checked"


def test_a_record_that_names_no_environment(model: Path) -> None:
    game, records = model.parent / "game.py", model.parent / "named.jsonl"
    game.write_text("async def rollout(client, prompt):\n    return 1.0\n")
    names = ("game", "gane")
    named = [{"prompt": "1+1=", "answer": "2", "environment": name} for name in names]
    records.write_text("".join(json.dumps(record) + "\n" for record in named))
    sections = {"environments": [{"name": "game", "file": str(game)}], "rewards": []}
    told = run(model, NOWHERE, "--json", f"data.files=[{records}]", status=1, **sections)
    (data,) = (f for f in json.loads(told)["findings"] if f["name"] == "data")
    assert data["verdict"] == "failed"
    assert f"{records}:2: its field environment names 'gane'" in data["seen"]
    assert "environments are game" in data["seen"] + data["remedy"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("trainer.batch_sise=4", "trainer.batch_sise"),
        ("model.path=/nowhere", "model.path"),
        ("data.files=[/nowhere.jsonl]", "data.files[0]"),
    ],
)
def test_a_wrong_configuration(model: Path, override: str, key: str) -> None:
    assert key in run(model, NOWHERE, override, status=2)


def test_records_have_no_endpoints(model: Path) -> None:
    records = {
        "source": "records",
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"files": [str(model.parent / "train.jsonl")]},
        "recipe": {"name": "sft"},
    }
    file = model.parent / "sft.yaml"
    file.write_text(json.dumps(records))
    result = CliRunner().invoke(command_line(), ["doctor", str(file), "--json"])
    told = json.loads(result.stdout)
    assert result.exit_code in (0, 1), result.output
    assert not any("endpoint" in f["name"] for f in told["findings"])
