"""The way in which tool calls are read is told at a run's start, or refused there"""

from __future__ import annotations

from pathlib import Path

import pytest

from easyrl.build.episodes import gateway_settings, tell_tool_parser
from easyrl.completion_check import Vocabulary
from easyrl.config import ConfigError
from tests.easyrl.build.test_episode_rows import load

TOOLS = """
model: {path: models/tiny}
data: {files: [train.jsonl]}
inference: {endpoints: ["http://127.0.0.1:8000"]}
environments:
  - name: sums
    tools: [{url: "http://127.0.0.1:9000"}]
    rewards: [{name: exact}]
trainer: {max_steps: 3}
"""


def test_what_was_chosen_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell_tool_parser(load(tmp_path, text=TOOLS), "hermes")
    assert "tool calls are read as hermes (data.tool_parser: auto)" in caplog.text
    caplog.clear()
    tell_tool_parser(load(tmp_path, "data.tool_parser=mistral", text=TOOLS), "mistral")
    assert not caplog.text


def test_a_tool_loop_whose_calls_nobody_reads_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"^data.tool_parser: .*hermes.*environments\[0\].tools"):
        tell_tool_parser(load(tmp_path, text=TOOLS), None)
    tell_tool_parser(load(tmp_path), None)  # an OpenEnv server has no tools
    assert "requests with tools are refused" in caplog.text


def test_the_gateway_is_told_the_parser_and_the_ends(tmp_path: Path) -> None:
    config = load(tmp_path, "data.tool_parser=mistral", text=TOOLS)
    settings = gateway_settings(config, Vocabulary(100, frozenset({7, 2})))
    assert settings.tool_parser == "mistral"
    assert settings.vocabulary == Vocabulary(100, frozenset({7, 2}))


def test_names_that_there_are_not_and_runs_without_environments_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="data.tool_parser: .*'hermes'.*'mistral'"):
        load(tmp_path, "data.tool_parser=xml", text=TOOLS)
    settings = ("data.tool_parser=hermes", "environments=[]", "rewards=[{name: exact}]")
    with pytest.raises(ConfigError, match="data.tool_parser: is for environments"):
        load(tmp_path, *settings)
