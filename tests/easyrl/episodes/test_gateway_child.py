"""The gateway's process as the trainer's loop sees it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from easyrl.config import SamplingConfig
from easyrl.episodes.gateway_child import GatewayChild
from easyrl.episodes.session import Session, SessionLost
from easyrl.gateway.messages import Settings
from easyrl.schema import Prompt
from tests.easyrl.episodes.parts import IDS, Endpoint
from tests.easyrl.gateway.gateway_parts import chat_tokenizer


def session() -> Session:
    return Session(Prompt(3, IDS, "q", None), SamplingConfig(max_tokens=4), 77, Endpoint())


async def ask(http: aiohttp.ClientSession, url: str, of: Session) -> list[int]:
    headers = {"Authorization": f"Bearer {of.key}"}
    body = {"token_ids": IDS.tolist()}
    async with http.post(f"{url}/inference/v1/generate", json=body, headers=headers) as response:
        return (await response.json())["choices"][0]["token_ids"]


async def test_bytes_that_are_no_http_fill_no_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chat_tokenizer().save_pretrained(tmp_path)
    gateway = GatewayChild(Settings(str(tmp_path)))
    try:
        one = session()
        async with gateway.serves(one) as url:
            for data in (b"A" * 2**16, b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n"):
                port = urlsplit(url).port
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                assert b" 400 " in await asyncio.wait_for(reader.read(2**16), 10)
                writer.close()
            async with aiohttp.ClientSession() as http:
                assert len(await ask(http, url, one)) == 4
    finally:
        await gateway.close()
    assert capfd.readouterr().err == ""


async def test_whoever_hears_first_of_its_end_an_episode_that_needs_it_is_lost(
    tmp_path: Path,
) -> None:
    chat_tokenizer().save_pretrained(tmp_path)
    gateway = GatewayChild(Settings(str(tmp_path)))
    try:
        async with aiohttp.ClientSession() as http:
            one = session()
            async with gateway.serves(one) as url:
                assert await ask(http, url, one) == one.records[0].completion.token_ids.tolist()
                assert gateway.child is not None
                os.kill(gateway.child.process.pid, signal.SIGKILL)
                with pytest.raises(aiohttp.ClientError):  # as a rollout, which ends by that
                    while True:
                        await ask(http, url, one)
            assert isinstance(one.failed.exception() if one.failed.done() else None, SessionLost)
            two = session()
            async with gateway.serves(two) as url:
                assert len(await ask(http, url, two)) == 4
            assert not two.failed.done()
    finally:
        await gateway.close()
