"""Checks of endpoints, against real embedded servers: right ones, and each kind of wrong one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from transformers import AutoTokenizer

from benchmarks.parts.random_model import write_random_model
from easyrl.build.doctor_endpoints import Policy, check_endpoints
from easyrl.build.inference import Inference
from easyrl.build.same_architecture import require_same_architecture
from easyrl.completion_check import Vocabulary
from easyrl.config import Config, ConfigError
from easyrl.dataloaders.prompts.dataset import load_prompts
from easyrl.doctor.architecture import architecture_finding, weight_shapes
from easyrl.doctor.endpoints import context_needs, reach
from easyrl.doctor.finding import Finding
from easyrl.inference_client.client import EndpointClient
from easyrl.runtime.loop_thread import LoopThread
from tests.easyrl.doctor.parts import NOWHERE, asked, config, serve
from tests.end_to_end.proxy import Proxy, reply
from tests.tiny_models import save_tiny_model

NAMES = ["endpoint", "architecture", "context", "tokenizer", "chat template", "weight transfer"]
LAST = "log-probabilities"


def findings(checked: Config) -> dict[str, Finding]:
    """By the first words of their names."""
    tokenizer = AutoTokenizer.from_pretrained(checked.model.tokenizer_path)
    policy = Policy(
        weight_shapes(checked.model),
        tokenizer,
        Vocabulary(len(tokenizer), frozenset({tokenizer.eos_token_id})),
        load_prompts(checked.data, tokenizer),
    )
    found = list(check_endpoints(checked, policy))
    assert all(f.remedy for f in found if f.verdict == "failed")
    return {f.name.rpartition(" ")[0].removesuffix(" of").removesuffix(" to"): f for f in found}


def verdicts(found: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.verdict for name, finding in found.items()}


def test_a_right_server(model: Path, server: str) -> None:
    checked = config(model, server)
    before = asked(server, lambda client: client.weight_version())
    found = findings(checked)
    assert verdicts(found) == dict.fromkeys([*NAMES, LAST], "ok"), found
    assert "by file" in found["weight transfer"].seen
    assert "to the bit" in found["weight transfer"].seen
    assert asked(server, lambda client: client.weight_version()) == before == "default"
    left = list(checked.weight_sync.directory.glob("easyrl-doctor-*"))
    assert left == []


def test_nobody_listens(model: Path) -> None:
    found = findings(config(model, NOWHERE))
    assert verdicts(found) == {"endpoint": "failed"}
    assert "inference.endpoints" in found["endpoint"].remedy


def test_a_key(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(model, api_key="a-secret-key") as url:
        without = config(model, url)
        assert verdicts(findings(without)) == {"endpoint": "failed"}
        assert "api_key_env" in findings(without)["endpoint"].remedy
        monkeypatch.setenv("EASYRL_TEST_KEY", "a-secret-key")
        inference = {"endpoints": [url], "api_key_env": "EASYRL_TEST_KEY"}
        found = findings(config(model, inference=inference))
        assert verdicts(found) == dict.fromkeys([*NAMES, LAST], "ok")


@pytest.fixture(scope="module")
def deeper(model: Path) -> Path:
    return write_random_model(model.parent / "deeper", hidden_size=64, num_layers=3)


@pytest.mark.parametrize("kind", ["deeper", "shallower", "another family", "another dtype"])
def test_another_architecture(model: Path, server: str, deeper: Path, kind: str) -> None:
    checked = config(model, server)
    if kind == "deeper":
        checked = config(deeper, server)
    if kind == "another family":
        checked = config(save_tiny_model(model.parent / "llama", "llama"), server)
    if kind == "another dtype":
        checked = config(model, server, model={"path": str(model), "dtype": "bf16"}, trainer={})
    shapes = weight_shapes(checked.model)
    if kind != "shallower":
        found = asked(server, lambda c: architecture_finding(c, checked.model, shapes))
    else:
        with serve(deeper) as url:
            found = asked(url, lambda c: architecture_finding(c, checked.model, shapes))
    assert found.verdict == "failed" and len(found.seen) < 500
    wanted = "--dtype bfloat16" if kind == "another dtype" else f"{checked.model.path}"
    assert wanted in found.remedy
    assert ("another dtype" in found.seen) == (kind == "another dtype")


def test_log_probabilities_are_not_asked_for_where_the_model_is_another(
    model: Path, deeper: Path
) -> None:
    with serve(deeper) as url:
        found = verdicts(findings(config(model, url)))
    assert found["architecture"] == "failed"
    assert not {"weight transfer", LAST} & found.keys()


def test_a_short_context(model: Path) -> None:
    with serve(model, max_model_len=31) as url:
        found = findings(config(model, url))["context"]
        assert found.verdict == "failed"
        assert "data.max_prompt_tokens + rollout.max_tokens is 32, it serves 31" in found.seen
        assert "--max-model-len" in found.remedy
    with serve(model, max_model_len=32) as url:
        assert findings(config(model, url))["context"].verdict == "ok"


def test_named_sets_of_an_evaluation_need_their_own_contexts(model: Path) -> None:
    data = {"files": ["held-out.jsonl"], "max_prompt_tokens": 10}
    sets = {"aime24": {"data": data}, "short": {"data": data, "sampling": {"max_tokens": 5}}}
    checked = config(model, evaluation={"sampling": {"max_tokens": 100}, **sets})
    assert context_needs(checked, rollout=False) == {
        "evaluation.aime24.data.max_prompt_tokens + evaluation.aime24.sampling.max_tokens": 110,
        "evaluation.short.data.max_prompt_tokens + evaluation.short.sampling.max_tokens": 15,
    }


def test_other_weights_of_the_same_architecture(model: Path, tmp_path: Path) -> None:
    other = write_random_model(
        tmp_path / "other", hidden_size=64, num_layers=2, seed=1, weight_std=0.2
    )
    with serve(other) as url:
        found = findings(config(model, url))
    assert found["architecture"].verdict == "ok"
    assert found["weight transfer"].verdict == "failed"
    assert str(model) in found["weight transfer"].seen
    assert found[LAST].verdict == "failed" and "limit 0.025 nats" in found[LAST].seen


def test_another_tokenizer_and_template(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    text = (other / "tokenizer.json").read_text()
    first, second = (tokenizer.convert_tokens_to_ids(each) for each in "01")
    swapped = text.replace(f'"0": {first}', f'"0": {second}').replace(
        f'"1": {second},', f'"1": {first},', 1
    )
    assert swapped != text
    (other / "tokenizer.json").write_text(swapped)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (other / "chat_template.jinja").write_text(template)
    without = {"files": [str(model.parent / "train.jsonl")], "apply_chat_template": False}
    with serve(other) as url:
        found = findings(config(model, url))
        unused = findings(config(model, url, data=without))
    assert verdicts(found)["tokenizer"] == verdicts(found)["chat template"] == "failed"
    assert "model.tokenizer" in found["tokenizer"].remedy
    assert unused["chat template"].verdict == "not checked"


def test_a_server_that_a_run_has_given_weights_is_left_alone(model: Path) -> None:
    with serve(model) as url:
        asked(url, lambda client: client.set_weight_version("mine:0:3"))
        found = findings(config(model, url))
        assert found["weight transfer"].verdict == "not checked"
        assert "mine:0:3" in found["weight transfer"].seen
        assert found[LAST].verdict == "not checked" and "mine:0:3" in found[LAST].seen


def test_own_servers_come_with_the_run(model: Path) -> None:
    inference = {"launch": {"engine": "embedded"}}
    (found,) = findings(config(model, inference=inference)).values()
    assert found.verdict == "not checked" and "inference.endpoints" in found.remedy


class Refusing(Proxy):
    """Answers 500 to ``path``, with 404 where ``is_missing``, and passes on all else."""

    def __init__(self, upstream: str, path: str, *, is_missing: bool = False) -> None:
        self._path, self._status = path, 404 if is_missing else 500
        super().__init__(upstream)

    async def answer(self, request: web.Request, body: bytes) -> web.Response | None:
        if request.path != self._path:
            return None
        return reply({"error": "not today"}, self._status)


@pytest.mark.parametrize(
    ("path", "is_missing", "check", "verdict"),
    [
        ("/inference/v1/generate", False, LAST, "failed"),
        ("/health", False, "endpoint", "failed"),
        ("/init_weight_transfer_engine", True, "weight transfer", "failed"),
        ("/weight_info", True, "weight transfer", "failed"),
        ("/tokenize", True, "tokenizer", "not checked"),
        ("/tokenize", False, "tokenizer", "not checked"),
        ("/version", True, "endpoint", "ok"),
    ],
)
def test_a_route_that_is_refused_costs_its_own_check(
    model: Path, server: str, path: str, is_missing: bool, check: str, verdict: str
) -> None:
    with closing(Refusing(server, path, is_missing=is_missing)) as proxy:
        found = verdicts(findings(config(model, proxy.url)))
    assert found[check] == verdict
    if path != "/health":
        others = {name: v for name, v in found.items() if name not in (check, "chat template")}
        assert others == dict.fromkeys({*NAMES, LAST} - {check, "chat template"}, "ok")


class OldServer(EndpointClient):
    """Of a plugin that does not know the question."""

    async def call_workers(self, decoder: Any, method: str, *others: Any) -> Any:
        return await super().call_workers(decoder, "easyrl_unknown", *others)


def test_a_server_that_does_not_tell_is_not_judged(model: Path, server: str) -> None:
    checked = config(model, server).model

    async def ask() -> Finding:
        async with aiohttp.ClientSession() as session:
            client = OldServer(server, session)
            assert (await reach(client))[1] is not None
            return await architecture_finding(client, checked, weight_shapes(checked))

    found = asyncio.run(ask())
    assert found.verdict == "not checked" and "plugin" in found.remedy


# ---- what a run looks at by itself ---------------------------------------------------------------


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    with LoopThread() as opened:
        yield opened


def require(checked: Config, thread: LoopThread, urls: list[str]) -> None:
    async def open_session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    session = thread.run(open_session())
    with closing(SimpleNamespace(close=lambda: thread.run(session.close()))):
        clients = [EndpointClient(url, session) for url in urls]
        endpoints = [SimpleNamespace(client=client, is_up=True) for client in clients]
        endpoints.append(SimpleNamespace(client=None, is_up=False))  # is not asked
        pool = SimpleNamespace(endpoints=endpoints)
        require_same_architecture(
            checked, cast(Inference, SimpleNamespace(pool=pool, thread=thread))
        )


def test_a_run_takes_the_right_one(model: Path, server: str, thread: LoopThread) -> None:
    require(config(model, server), thread, [server])
    require(config(model, server), thread, [])


def test_a_run_refuses_another_architecture_in_a_sentence(
    deeper: Path, server: str, thread: LoopThread
) -> None:
    with pytest.raises(ConfigError) as refused:
        require(config(deeper, server), thread, [server])
    said = str(refused.value)
    assert said.startswith(f"inference.endpoints: {server}: it serves another model than")
    assert "model.path" in said and "\n" not in said


def test_a_run_goes_on_where_one_of_several_is_right(
    model: Path, deeper: Path, server: str, thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(deeper) as other:
        require(config(model, server), thread, [server, other])
    assert f"{other}: it serves another model" in caplog.text


def test_who_does_not_answer_is_not_judged(model: Path, thread: LoopThread) -> None:
    require(config(model), thread, [NOWHERE])
