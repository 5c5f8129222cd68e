"""Checks of endpoints, against a real vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from easyrl.inference_client.servers.managed.launch import VllmServerProcess
from tests.easyrl.doctor.parts import config
from tests.easyrl.doctor.test_endpoint_checks import LAST, NAMES, findings, verdicts
from tests.inference_client.contract.served_models import save_contract_model
from tests.tiny_models import save_tiny_model
from tests.vllm_environment import VLLM_PYTHON

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("doctor")
    model = save_contract_model(folder / "model", tied=False)
    records = [{"prompt": "1+2", "answer": "3"}, {"prompt": "1+3", "answer": "4"}]
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    options = ["--max-model-len", "512"]
    with VllmServerProcess(model, Path(VLLM_PYTHON), options, log=folder / "log") as process:
        yield model, process.url


def sections(model: Path) -> dict[str, object]:
    file = str(model.parent / "train.jsonl")
    return {"data": {"files": [file], "max_prompt_tokens": 16, "apply_chat_template": False}}


def test_a_right_server(served: tuple[Path, str]) -> None:
    model, url = served
    found = findings(config(model, url, **sections(model)))
    expected = dict.fromkeys([*NAMES, LAST], "ok") | {"chat template": "not checked"}
    assert verdicts(found) == expected, found
    assert "vLLM 0." in found["endpoint"].seen
    assert "to the bit" in found["weight transfer"].seen


def test_another_architecture(served: tuple[Path, str]) -> None:
    model, url = served
    other = save_tiny_model(model.parent / "other", "qwen3", head_dim=32, num_hidden_layers=3)
    section = {"path": str(other), "tokenizer": str(model), "dtype": "fp32"}
    found = findings(config(model, url, model=section, **sections(model)))
    assert found["architecture"].verdict == "failed"
    assert "model.layers.2." in found["architecture"].seen
    assert str(other) in found["architecture"].remedy
