"""The gateway's process: started again where it dies, and an end where it does not come up."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from easyrl.config import SamplingConfig
from easyrl.episodes import gateway_child
from easyrl.episodes.gateway_child import GatewayChild
from easyrl.episodes.session import Session, SessionLost
from easyrl.gateway.messages import Settings, Working, encode
from easyrl.schema import GatewayGone, Prompt
from tests.easyrl.episodes.parts import IDS, Endpoint
from tests.easyrl.gateway.gateway_parts import chat_tokenizer


def session() -> Session:
    return Session(Prompt(0, IDS, "q", None), SamplingConfig(max_tokens=4), 7, Endpoint())


async def killed(gateway: GatewayChild) -> None:
    """Returns when its session is lost."""
    lost = session()
    async with gateway.serves(lost):
        assert gateway.child is not None
        os.kill(gateway.child.process.pid, signal.SIGKILL)
        with pytest.raises(SessionLost, match="the gateway's process ended"):
            await lost.failed


async def test_one_that_does_not_come_up_again_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_child, "RESTART_AFTER_S", 0.05)
    folder = tmp_path / "tokenizer"
    chat_tokenizer().save_pretrained(folder)
    gateway = GatewayChild(Settings(str(folder)))
    try:
        assert await gateway.start() is None
        await killed(gateway)
        async with gateway.serves(session()) as url:  # it comes up again
            assert url.startswith("http://127.0.0.1:")
        folder.rename(tmp_path / "elsewhere")
        await killed(gateway)
        with pytest.raises(GatewayGone, match="could not be started 3 times: exit code 1.*token"):
            async with gateway.serves(session()):
                raise AssertionError
    finally:
        await gateway.close()


@pytest.mark.parametrize("is_told", [True, False])
async def test_those_that_were_worked_on_are_suspects_or_else_all(
    tmp_path: Path, is_told: bool
) -> None:
    chat_tokenizer().save_pretrained(tmp_path)
    gateway = GatewayChild(Settings(str(tmp_path)))
    first, second = session(), session()
    try:
        await gateway.start()
        async with gateway.serves(first), gateway.serves(second):
            assert gateway.child is not None
            gateway.on_message(encode([Working(second.id, True)]))
            if is_told:  # of two requests side by side, one of which is over
                gateway.on_message(encode([Working(first.id, True), Working(first.id, True)]))
                gateway.on_message(encode([Working(first.id, False), Working(second.id, False)]))
            else:
                gateway.on_message(encode([Working(second.id, False)]))
            os.kill(gateway.child.process.pid, signal.SIGKILL)
            await asyncio.wait([first.failed, second.failed])
        for of, is_suspect in ((first, True), (second, not is_told)):
            error = of.failed.exception()
            assert isinstance(error, SessionLost) and error.is_suspect == is_suspect
    finally:
        await gateway.close()


async def test_one_that_never_served_is_not_tried_again(tmp_path: Path) -> None:
    gateway = GatewayChild(Settings(str(tmp_path / "nothing")))
    try:
        with pytest.raises(GatewayGone, match="could not be started: exit code 1"):
            await gateway.start()
    finally:
        await gateway.close()


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
