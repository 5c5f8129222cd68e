"""Configurations, models and honest servers for the tests of the checks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from easyrl.config import Config
from easyrl.config.file import validate_config
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.routes import EmbeddedServer
from easyrl.inference_client.servers.embedded.server import start_site
from easyrl.runtime.loop_thread import LoopThread

T = TypeVar("T")
NOWHERE = "http://127.0.0.1:1"  # nobody listens there


def settings(model: Path, url: str = NOWHERE, /, **sections: Any) -> dict[str, Any]:
    """A configuration as a file has it; ``sections`` replace whole ones."""
    return {
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"files": [str(model.parent / "train.jsonl")], "max_prompt_tokens": 16},
        "rollout": {"max_tokens": 16, "num_generations": 4},
        "inference": {"endpoints": [url]},
        "rewards": [{"name": "exact"}],
        "scoring": {"num_workers": 1},
        "trainer": {"zero_stage": 0, "batch_size": 4},
        "run": {"output_dir": str(model.parent / "run")},
    } | sections


def config(model: Path, url: str = NOWHERE, /, **sections: Any) -> Config:
    return validate_config(settings(model, url, **sections))


def write_records(model: Path, count: int = 8) -> Path:
    """Sums and their results beside the model."""
    file = model.parent / "train.jsonl"
    records = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(count)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@contextmanager
def serve(model: Path, *, api_key: str | None = None, **options: Any) -> Iterator[str]:
    """The embedded server in this process; its URL."""
    engine = EmbeddedEngine(model, **options)
    with LoopThread("server") as thread:
        app = EmbeddedServer(engine, "model").app(api_key)
        runner, url = thread.run(start_site(app, "127.0.0.1", 0))
        try:
            yield url
        finally:
            thread.run(runner.cleanup())
            engine.close()


def asked(
    url: str, question: Callable[[EndpointClient], Awaitable[T]], api_key: str | None = None
) -> T:
    """What ``question`` gives of a client of ``url``."""

    async def ask() -> T:
        async with aiohttp.ClientSession() as session:
            return await question(EndpointClient(url, session, api_key, timeout_s=10))

    return asyncio.run(ask())
