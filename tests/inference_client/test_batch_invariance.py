"""``--batch-invariant``: nothing that a server does besides changes a bit of a response.

Everything is compared to the bit, tokens and log-probabilities, with the same request answered by
a server that has done nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import requests
import torch

from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.requests import GenerationRequest, Sequence
from easyrl.inference_client.servers.embedded.sampling import SamplingParams
from easyrl.inference_client.servers.embedded.server import main
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.runtime.numerics import arithmetic
from tests.tiny_models import VOCAB_SIZE, Family, tiny_model

FAMILIES: tuple[Family, ...] = ("qwen3", "qwen3_moe")
NUM_OTHERS = 63
SEED = 5
rng = np.random.default_rng(0)
PROMPT = rng.integers(1, VOCAB_SIZE, 21)


class Bits(NamedTuple):
    """A response to the bit."""

    token_ids: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, sample: Sequence) -> Bits:
        return cls(sample.token_ids, sample.logprobs)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    # large enough for kernels of several kinds: by rows, edges, remainders
    sizes = {"hidden_size": 96, "intermediate_size": 160}
    tiny_model(request.param, tied=True, **sizes).save_pretrained(folder)
    return folder


def open_engine(model: Path, **settings: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model, dtype="float32", batch_invariant=True, **settings)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EmbeddedEngine]:
    engine = open_engine(model)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(model: Path) -> Bits:
    """The response of an engine that has done nothing else."""
    engine = open_engine(model)
    try:
        return Bits.of(ask(engine).result(60)[0])
    finally:
        engine.close()


def ask(
    engine: EmbeddedEngine, prompt: np.ndarray = PROMPT, n: int = 1, seed: int = SEED, **params: Any
) -> Future[list[Sequence]]:
    asked = {"max_tokens": 40, "ignore_eos": True} | params
    return engine.submit(GenerationRequest(prompt, SamplingParams(seed=seed, n=n, **asked)))


def others() -> list[dict[str, Any]]:
    """Requests of all kinds: lengths, penalties, truncated distributions, the same prompt."""
    rng = np.random.default_rng(1)
    kinds: list[dict[str, Any]] = [
        *({}, {"temperature": 0.7}, {"top_p": 0.8, "top_k": 9}, {"presence_penalty": 1.0}),
        *({"min_p": 0.1}, {"temperature": 0.0}, {"min_tokens": 3, "ignore_eos": False}),
    ]
    asked = []
    for number in range(NUM_OTHERS):
        prompt = PROMPT if number % 9 == 0 else rng.integers(1, VOCAB_SIZE, rng.integers(1, 70))
        if number % 9 == 1:  # has its beginning in common
            prompt = np.concatenate((PROMPT, prompt))
        limit = int(rng.integers(3, 12))
        kind = {"max_tokens": limit} | kinds[number % len(kinds)]
        asked.append({"prompt": prompt, "seed": number, **kind})
    return asked


def test_beside_63_others_in_any_order(engine: EmbeddedEngine, alone: Bits) -> None:
    seen: list[list[Bits]] = []
    for order in range(2):
        requests = [*enumerate(others()), (NUM_OTHERS, {})]
        random.Random(order).shuffle(requests)
        futures = {number: ask(engine, **request) for number, request in requests}
        seen.append([Bits.of(futures[number].result(60)[0]) for number in range(NUM_OTHERS + 1)])
        assert seen[-1][NUM_OTHERS] == alone
    assert seen[0] == seen[1]
    assert len({tuple(bits.token_ids) for bits in seen[0]}) > NUM_OTHERS / 2


def test_after_a_try_that_was_cut_off(engine: EmbeddedEngine, alone: Bits) -> None:
    for request in others()[:3]:
        ask(engine, **request)
    cut = GenerationRequest(PROMPT, SamplingParams(max_tokens=200, seed=SEED, ignore_eos=True))
    first = engine.submit(cut)
    engine.abort(cut)
    assert first.result(60)[0].finish_reason == "abort"
    assert Bits.of(ask(engine).result(60)[0]) == alone


def test_with_and_without_a_warm_prefix_cache(engine: EmbeddedEngine, alone: Bits) -> None:
    ask(engine, PROMPT[:15]).result(60)
    running = ask(engine, max_tokens=100)
    warm = ask(engine)
    running.result(60)
    assert Bits.of(warm.result(60)[0]) == alone
    engine.reset_prefix_cache().result(60)
    assert Bits.of(ask(engine).result(60)[0]) == alone


def test_as_one_of_several_samples(engine: EmbeddedEngine, alone: Bits) -> None:
    several = ask(engine, n=4).result(60)
    assert Bits.of(several[0]) == alone
    assert len({tuple(sample.token_ids) for sample in several}) == 4
    crowd = [ask(engine, **request) for request in others()[:9]]
    again = ask(engine, n=4).result(60)
    assert [Bits.of(sample) for sample in again] == [Bits.of(sample) for sample in several]
    for future in crowd:
        future.result(60)


def test_of_weights_that_lie_elsewhere_in_other_files(
    model: Path, alone: Bits, tmp_path: Path
) -> None:
    family = FAMILIES["moe" in (model / "config.json").read_text()]
    sizes = {"hidden_size": 96, "intermediate_size": 160}
    tiny_model(family, tied=True, **sizes).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    engine = open_engine(tmp_path, max_num_seqs=8, max_model_len=256)
    try:
        assert Bits.of(ask(engine).result(60)[0]) == alone
    finally:
        engine.close()


def generate(url: str, seed: int = SEED) -> Bits:
    params = {"max_tokens": 40, "ignore_eos": True, "seed": seed, "logprobs": 0}
    body = {"token_ids": PROMPT.tolist(), "sampling_params": params}
    answer = requests.post(f"{url}/inference/v1/generate", json=body, timeout=60).json()
    (choice,) = answer["choices"]
    return Bits(choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]])


def test_in_another_process_and_the_server_tells(alone: Bits, model: Path) -> None:
    # all processors that there are: one thread is used all the same
    with EmbeddedServerProcess(model, ["--batch-invariant", "--dtype=float32"]) as server:
        assert generate(server.url) == alone
        assert generate(server.url, seed=6) != alone
        (card,) = requests.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert card["batch_invariant"] is True
    assert card["arithmetic"] == arithmetic()
    assert card["arithmetic"].endswith(", 1 thread")


def test_the_option_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "--batch-invariant" in capsys.readouterr().out
