"""Checks of environments: the gateway's chat template, tool calls, and that each is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from easyrl.build.doctor import Diagnosis
from easyrl.build.doctor_environments import check_environments
from easyrl.completion_check import Vocabulary
from easyrl.config import Config
from easyrl.doctor.finding import Finding
from tests.easyrl.doctor.parts import config
from tests.easyrl.gateway.gateway_parts import PLAIN, STRIPPING

ROLLOUT = "async def rollout(client, prompt):\n    return 0.0\n"
RAISING = "raise RuntimeError('no such game')\n"
EXACT = {"name": "exact"}


def configured(
    folder: Path, model: Path, template: str | None, *more: dict[str, Any], **files: str
) -> Config:
    data: dict[str, Any] = {"files": [str(model.parent / "train.jsonl")], "max_prompt_tokens": 16}
    if template is not None:
        (folder / "own.jinja").write_text(template)
        data["chat_template"] = str(folder / "own.jinja")
    environments: list[dict[str, Any]] = []
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
        environments.append({"name": name, "file": str(folder / f"{name}.py")})
    return config(model, data=data, environments=[*environments, *more], rewards=[])


def found(settings: Config) -> dict[str, Finding]:
    findings = list(check_environments(settings, Vocabulary(100)))
    assert len({each.name for each in findings}) == len(findings)
    assert all(each.remedy for each in findings if each.verdict == "failed")
    return {each.name: each for each in findings}


def test_what_is_loaded_and_what_is_not(model: Path, tmp_path: Path) -> None:
    before = len(psutil.Process().children(recursive=True))
    seen = found(configured(tmp_path, model, PLAIN, game=ROLLOUT, broken=RAISING))
    assert {name: each.verdict for name, each in seen.items()} == {
        "chat template of environments": "ok",
        "tool calls": "ok",
        "environment game": "ok",
        "environment broken": "failed",
    }
    assert "continues a conversation exactly" in seen["chat template of environments"].seen
    assert "read as hermes" in seen["tool calls"].seen
    problem = seen["environment broken"].seen
    assert problem.startswith("environments[1]: ") and "no such game" in problem
    assert len(psutil.Process().children(recursive=True)) == before  # nothing is left behind


def test_a_template_that_strips_reasoning_is_told(model: Path, tmp_path: Path) -> None:
    seen = found(configured(tmp_path, model, STRIPPING, game=ROLLOUT))
    said = seen["chat template of environments"]
    assert said.verdict == "ok" and "leaves out the reasoning of earlier turns" in said.seen
    assert "game (history: keep)" in said.seen


def test_tools_whose_calls_nobody_reads(model: Path, tmp_path: Path) -> None:
    """The template shows tools in a way of its own."""
    plain = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tools = {"name": "sums", "tools": [{"url": "http://127.0.0.1:9"}], "rewards": [EXACT]}
    seen = found(configured(tmp_path, model, plain, tools))
    assert seen["environments"].verdict == "failed"
    assert "data.tool_parser" in seen["environments"].seen


@pytest.mark.parametrize("has_some", [True, False])
def test_they_are_among_the_findings(model: Path, tmp_path: Path, has_some: bool) -> None:
    settings = configured(tmp_path, model, PLAIN, game=ROLLOUT) if has_some else config(model)
    diagnosis = Diagnosis(settings, lambda more: settings)
    names = [each.name for each in diagnosis.findings()]
    assert ("environment game" in names) is has_some
