"""``environments[…].tools``: what is refused, and the secrets of MCP servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from easyrl.config import ToolsConfig
from easyrl.config.file import dump_config, load_config

TEXT = """
model: {path: MODEL}
data: {files: [prompts.jsonl]}
inference: {endpoints: ["http://127.0.0.1:1"]}
environments:
  - name: search
    tools:
      - command: [my-server]
        env: {SEARCH_API_KEY: "${oc.env:SEARCH_KEY}", REGION: eu}
      - url: http://127.0.0.1:2/mcp
        headers: {Authorization: "Bearer ${oc.env:SEARCH_KEY}", X-Api-Key: "${oc.env:SEARCH_KEY}"}
    rewards: [{name: exact}]
"""


@pytest.mark.parametrize(
    ("given", "says_so"),
    [
        ({"url": "http://x/mcp", "env": {"A": "b"}}, "env: is for command; remove it"),
        ({"command": ["x"], "headers": {"A": "b"}}, "headers: are for url; remove them"),
        ({"command": ["x"], "env": {"A=": "b"}}, "env: 'A=' is no name of a variable"),
        ({"url": "http://x", "headers": {"A B": "b"}}, "headers: 'A B' is no name of a header"),
        ({}, "give one of file, command and url"),
    ],
)
def test_what_is_refused(given: dict[str, Any], says_so: str) -> None:
    with pytest.raises(ValidationError, match=says_so):
        ToolsConfig.model_validate(given)


def test_secrets_come_from_variables_and_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEARCH_KEY", "MARKED")
    file = tmp_path / "run.yaml"
    file.write_text(TEXT.replace("MODEL", str(tmp_path)))
    config = load_config(file)
    started, reached = config.environments[0].tools
    assert started.env == {"SEARCH_API_KEY": "MARKED", "REGION": "eu"}
    assert reached.headers == {"Authorization": "Bearer MARKED", "X-Api-Key": "MARKED"}
    dumped = dump_config(config)
    assert "MARKED" not in dumped
    written = yaml.safe_load(dumped)["environments"][0]["tools"]
    assert written[0]["env"] == {"SEARCH_API_KEY": "${oc.env:SEARCH_KEY}", "REGION": "eu"}
    assert written[1]["headers"]["Authorization"] == "Bearer ${oc.env:SEARCH_KEY}"
    plain = load_config(file, ["environments[0].tools[0].env.SEARCH_API_KEY=MARKED"])
    assert "MARKED" not in dump_config(plain)
