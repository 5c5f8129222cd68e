"""Environments of test files, and rollouts in them against a scripted server."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from easyrl.config import EnvironmentConfig
from easyrl.environments.host_process import Outcome
from easyrl.environments.hosts import EnvironmentHosts
from easyrl.schema import Prompt
from tests.easyrl.environments.scripted_chat import ScriptedChat

NO_TOKENS = np.zeros(1, np.int32)


def prompt(text: str = "hello", index: int = 0, **fields: Any) -> Prompt:
    return Prompt(index, NO_TOKENS, text, fields.pop("answer", "4"), **fields)


def written(folder: Path, source: str, name: str = "environment.py") -> Path:
    file = folder / name
    file.write_text(textwrap.dedent(source))
    return file


def coroutine(folder: Path, source: str, **keys: Any) -> EnvironmentConfig:
    return EnvironmentConfig(name="test", file=written(folder, source), **keys)


@asynccontextmanager
async def running(
    environment: EnvironmentConfig, cancel_grace_s: float = 0.5
) -> AsyncIterator[EnvironmentHosts]:
    hosts = EnvironmentHosts(environment, cancel_grace_s=cancel_grace_s)
    try:
        await hosts.start()
        yield hosts
    finally:
        await hosts.close()


async def rollout(
    hosts: EnvironmentHosts,
    chat: ScriptedChat,
    asked: Prompt | str = "hello",
    session: str = "s",
    seed: int = 7,
) -> Outcome:
    given = prompt(asked) if isinstance(asked, str) else asked
    return await hosts.run(
        chat.session(session),
        chat.key,
        given,
        seed,
        lambda: chat.seconds_since_request(session),
    )
