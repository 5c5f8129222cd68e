"""The gateway as a process of its own."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from easyrl.config import SamplingConfig
from easyrl.gateway.messages import Ask, Open, Ready, Settings, decode_requests, encode
from easyrl.gateway.process import ENTRY
from easyrl.gateway.prompts import template_continues
from easyrl.gateway.rendering import Renderer
from easyrl.runtime.workers.supervised_child import SupervisedChild
from tests.easyrl.gateway.gateway_parts import (
    ALTERNATING,
    KEY,
    PLAIN,
    STRIPPING,
    answer_of,
    chat_tokenizer,
    until,
    user,
)


class Gateway(SupervisedChild):
    """Answers every question with the same tokens."""

    def __init__(self, settings):
        super().__init__(ENTRY, encode(settings))
        self.port, self.ends, self.num_messages = None, [], 0

    def on_message(self, payload):
        self.num_messages += 1
        for request in decode_requests(payload):
            if isinstance(request, Ready):
                self.port = request.port
            elif isinstance(request, Ask):
                self.send(encode([answer_of(request.number, [1, 2, 3])]))

    def on_end(self, how):
        self.ends.append(how)


@pytest.fixture
def folder(tmp_path):
    chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


async def test_it_serves_beats_and_loads_no_torch(folder):
    gateway = Gateway(Settings(str(folder)))
    gateway.ensure_started()
    try:
        await until(lambda: gateway.port or gateway.ends, 60)
        assert not gateway.ends
        told = SamplingConfig().model_dump_json().encode()
        gateway.send(encode([Open("s", KEY, told)]))
        await asyncio.sleep(0.2)
        url = f"http://127.0.0.1:{gateway.port}/sessions/s/v1/chat/completions"
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(url, json={"messages": [user("hello")]}) as response:
                assert response.status == 200
                assert (await response.json())["usage"]["completion_tokens"] == 3
        assert "libtorch" not in Path(f"/proc/{gateway.child.process.pid}/maps").read_text()
        before = gateway.num_messages
        await asyncio.sleep(2.5)
        assert gateway.num_messages >= before + 2
    finally:
        await gateway.close()


async def test_a_folder_without_a_tokenizer_ends_it(tmp_path):
    gateway = Gateway(Settings(str(tmp_path / "nothing")))
    gateway.ensure_started()
    try:
        await until(lambda: gateway.ends, 60)
        assert gateway.ends == ["exit code 1"] and gateway.port is None
    finally:
        await gateway.close()


OPENED = PLAIN.replace(
    "<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif"
)
EMPTY = PLAIN.replace(
    "<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif"
)


@pytest.mark.parametrize(
    "template, problem",
    [
        (PLAIN, None),
        (OPENED, "it renders what came before"),
        (EMPTY, "it renders what came before"),
        (STRIPPING, "leaves out the reasoning"),
        (PLAIN.replace("{{ m.content or '' }}", "{{ (m.content or '') | upper }}"), "it renders"),
        (ALTERNATING, "it renders an answer"),  # a space before it that the prompt has not
        ("{{ messages[-1].content }}", "it renders what came before"),
        ("{{ raise_exception('no') }}", "refuses"),
    ],
)
def test_whether_a_template_continues_is_said(template, problem):
    said = template_continues(Renderer(chat_tokenizer(template)))
    assert said is None if problem is None else problem in said
