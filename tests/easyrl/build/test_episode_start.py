"""What a run with environments says at its start of the chat template, and refuses."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from easyrl.build.episodes import open_episodes
from easyrl.completion_check import Vocabulary
from easyrl.config import Config, ConfigError
from easyrl.config.file import validate_config
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.runtime.loop_thread import LoopThread
from tests.easyrl.gateway.gateway_parts import PLAIN, STRIPPING
from tests.tiny_tokenizer import tiny_tokenizer

EXACT = {"name": "exact"}
# nothing is asked of it before an episode is played
NO_POOL = cast(EndpointPool, SimpleNamespace(endpoints=()))


def config(folder: Path, template: str | None, *more: dict[str, Any]) -> Config:
    tiny_tokenizer(None).save_pretrained(folder)
    (folder / "game.py").write_text("async def rollout(client, prompt):\n    return 0.0\n")
    file, own = str(folder / "game.py"), {}
    if template is not None:
        (folder / "own.jinja").write_text(template)
        own = {"chat_template": str(folder / "own.jinja")}
    return validate_config(
        {
            "model": {"path": str(folder), "dtype": "fp32"},
            "data": {"files": ["prompts.jsonl"], **own},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "environments": [
                {"name": "kept", "file": file},
                {"name": "rendered", "file": file, "history": "as_template"},
                *more,
            ],
            "trainer": {"zero_stage": 0},
        }
    )


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (PLAIN, ["environments: the chat template continues a conversation exactly"]),
        (
            STRIPPING,
            [
                "not continue a conversation exactly: it leaves out the reasoning",
                "kept (history: keep) continues the tokens that were sampled",
                "rendered (history: as_template) begins a branch",
            ],
        ),
        (None, ["has no chat template, so that chat requests are refused"]),
    ],
)
def test_whether_the_template_continues_exactly_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str | None, parts: list[str]
) -> None:
    with ExitStack() as opened, caplog.at_level(logging.WARNING):
        thread = opened.enter_context(LoopThread())
        settings, vocabulary = config(tmp_path, template), Vocabulary(100)
        assert open_episodes(settings, opened, thread, NO_POOL, vocabulary) is not None
    (said,) = [each.message for each in caplog.records if "template" in each.message]
    assert all(part in said for part in parts)
    # where chats are refused, no calls are read
    assert ("tool calls are read as" in caplog.text) == (template is not None)


def test_tools_that_no_template_can_show_are_refused(tmp_path: Path) -> None:
    tools = [{"url": "http://127.0.0.1:9000"}]
    settings = config(tmp_path, None, {"name": "sums", "tools": tools, "rewards": [EXACT]})
    problem = (
        r"^environments\[2\]\.tools: .* has no chat template .*; give one as data.chat_template"
    )
    with ExitStack() as opened, pytest.raises(ConfigError, match=problem):
        thread = opened.enter_context(LoopThread())
        open_episodes(settings, opened, thread, NO_POOL, Vocabulary(100))
