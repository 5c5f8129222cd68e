"""What is refused at the start: tokenizers, token ids, an attention that the device lacks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from easyrl.build.endpoints import require_weight_routes
from easyrl.build.inference import Inference, Scoring, open_inference
from easyrl.build.servers import start_servers
from easyrl.build.tokenizer import check_chat_template, load_tokenizer
from easyrl.build.trial import try_attention
from easyrl.build.vocabulary import require_known_tokens
from easyrl.completion_check import Vocabulary
from easyrl.config import Config, ConfigError, EnvironmentConfig
from easyrl.config.file import validate_config
from easyrl.inference_client.errors import EndpointUnavailable, RequestRejected
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.workers.worker_pool import WorkerPool
from tests.inference_client.test_launch import fake_vllm
from tests.tiny_tokenizer import tiny_tokenizer


def config(model: Path, inference: dict[str, object] | None = None, **settings: object) -> Config:
    return validate_config(
        {
            "model": {"path": str(model), "dtype": "fp32"} | settings,
            "data": {"files": ["prompts.jsonl"]},
            "inference": inference or {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "trainer": {"zero_stage": 0},
        }
    )


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.tokenizer: .* has no tokenizer; give a folder"):
        load_tokenizer(config(tmp_path))


def test_a_tokenizer_that_is_cut_off(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(config(tmp_path)) is not None
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text[:500])
    with pytest.raises(ConfigError, match=r"model\.tokenizer: .* cannot be read \(.*; give a fold"):
        load_tokenizer(config(tmp_path))


BROKEN = "{% for message in messages %}{{ message.content }}\n{% if %}"


def with_environment(model: Path, **data: object) -> Config:
    made = config(model)
    (model / "game.py").touch()
    environment = EnvironmentConfig(name="game", file=model / "game.py")
    of_data = made.data.model_copy(update=data)
    return made.model_copy(update={"environments": [environment], "data": of_data})


def test_a_chat_template_that_is_no_template(tmp_path):
    """Environments' chats are rendered in another process: it is found before that is started."""
    tokenizer = tiny_tokenizer(BROKEN)
    check_chat_template(config(tmp_path), tokenizer)  # nobody chats
    with pytest.raises(
        ConfigError, match=r"model\.tokenizer: .* is not Jinja \(its line 2: .*data\.ch"
    ):
        check_chat_template(with_environment(tmp_path), tokenizer)
    own = tmp_path / "own.jinja"
    own.write_text(BROKEN)
    with pytest.raises(ConfigError, match=r"data\.chat_template: .*own\.jinja is not Jinja"):
        check_chat_template(with_environment(tmp_path, chat_template=own), tiny_tokenizer())
    own.write_text("{{ messages[0].content }}")
    check_chat_template(with_environment(tmp_path, chat_template=own), tokenizer)
    check_chat_template(with_environment(tmp_path), tiny_tokenizer(None))  # the token route is left


def test_a_template_that_refuses_a_chat_is_none_of_a_mistake(tmp_path):
    refusing = "{{ raise_exception('a system message is needed') }}"
    check_chat_template(with_environment(tmp_path), tiny_tokenizer(refusing))


def test_token_ids_beyond_the_embedding(tmp_path):
    token_ids = [np.array([1, 7], np.int32)]
    require_known_tokens(config(tmp_path), token_ids, 8)
    with pytest.raises(ConfigError, match=r"gives token id 7, but model\.path .* of 7 ids; use"):
        require_known_tokens(config(tmp_path), token_ids, 7)


@pytest.mark.parametrize("name", ["auto", "reference", "merged"])
def test_an_attention_that_runs_here(tmp_path, name):
    try_attention(config(tmp_path, attention=name))


def test_an_attention_that_the_device_lacks(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.attention: npu cannot be used on .*; use auto"):
        try_attention(config(tmp_path, attention="npu"))


class Client:
    """An endpoint's client that says what it serves, or refuses to."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def weight_version(self, timeout_s: float) -> str:
        if self.error is not None:
            raise self.error
        return "default"


REFUSED = RequestRejected("http://a:1", "GET /weight_info answered 404; start vLLM with FLAGS")
GONE = EndpointUnavailable("http://b:1", "no connection")


@pytest.mark.parametrize(
    ("errors", "is_refused"),
    [([REFUSED], True), ([REFUSED, None], False), ([GONE], False), ([None], False), ([], False)],
)
def test_endpoints_without_weight_routes(errors, is_refused):
    endpoints = [SimpleNamespace(is_up=True, client=Client(error)) for error in errors]
    endpoints.append(SimpleNamespace(is_up=False, client=None))  # is not asked
    pool = SimpleNamespace(endpoints=endpoints, probe_timeout_s=1.0)
    with LoopThread() as thread:
        inference = cast(Inference, SimpleNamespace(pool=pool, thread=thread))
        if not is_refused:
            require_weight_routes(inference)
            return
        with pytest.raises(ConfigError, match=r"inference\.endpoints: .*(?s:.)*a:1: GET /weight_i"):
            require_weight_routes(inference)


def test_an_own_server_that_refuses_its_options_is_not_waited_for(tmp_path):
    """startup_timeout_s is five minutes: the test's own limit."""
    server = "import argparse\nargparse.ArgumentParser().parse_args()"
    python = fake_vllm(tmp_path / "environment", "vllm", "easyrl-vllm", server=server)
    (tmp_path / "config.json").write_text("{}")
    launched = {"launch": {"engine": "vllm", "python": str(python), "options": ["--typo"]}}
    settings = config(tmp_path, inference=launched)
    with ExitStack() as opened:
        servers = start_servers(settings, opened, tmp_path / "servers")
        scoring = Scoring(opened.enter_context(LoopThread()), WorkerPool(1))
        said = r"(?s)inference\.launch: .*none will be:.*unrecognized .* --typo\n\(correct its"
        with pytest.raises(ConfigError, match=said):
            open_inference(settings, opened, scoring, vocabulary=Vocabulary(8), servers=servers)
