"""The gateway's benchmark: what its server answers, and what is made of the windows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gateway import _result
from benchmarks.parts.gateway.load import (
    LATENCY_S,
    NUM_TURNS,
    NUM_VARIANTS,
    SAMPLED_TOKENS,
    SPREAD,
    Texts,
    read_variants,
    write_tokenizer,
    write_variants,
)
from benchmarks.parts.gateway.server import Script
from benchmarks.parts.gateway.sessions import Load, Turns, Way, sessions
from benchmarks.parts.gateway.windows import Window
from easyrl.ledger.journal.reading import JournalFile
from easyrl.ledger.journal.turns import read_turns


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load")
    tokenizer = write_tokenizer(folder)
    write_variants(folder / "variants.json", Texts(tokenizer), tokenizer, 3)
    return folder / "variants.json"


def test_a_seed_decides_answer_and_delay(variants: Path) -> None:
    made = read_variants(variants)
    assert len(made) == NUM_VARIANTS and len({variant.text for variant in made}) == NUM_VARIANTS
    assert all(abs(variant.delay_s - LATENCY_S) <= LATENCY_S * SPREAD for variant in made)
    script = Script(made)
    body = json.dumps({"token_ids": [7, 8, 9], "sampling_params": {"seed": 5}}).encode()
    response = script.answer(b"/inference/v1/generate", body)
    answer = json.loads(response.content.partition(b"\r\n\r\n")[2])
    assert answer["choices"][0]["token_ids"] == made[5].token_ids
    assert len(made[5].token_ids) == SAMPLED_TOKENS
    assert answer["usage"]["prompt_tokens"] == 3 and response.delay_s == made[5].delay_s
    chat = json.dumps({"messages": [], "seed": NUM_VARIANTS + 6}).encode()
    answer = json.loads(
        script.answer(b"/v1/chat/completions", chat).content.partition(b"\r\n\r\n")[2]
    )
    assert answer["choices"][0]["message"]["content"] == made[6].text
    assert b" 404 " in script.answer(b"/other", b"").content


def window(way: Way, step_s: float, chat_s: float, tokens_s: float) -> Window:
    cpu_s = {"gateway": 0.02, "fetcher": 0.01, "producer's thread": 0.01, "client": 9.0}
    return Window(way, step_s, Turns({"chat": [chat_s] * 9, "tokens": [tokens_s]}), cpu_s)


@pytest.mark.parametrize(
    ("step_s", "chat_s", "is_good"),
    [(0.102, 0.005, True), (0.104, 0.005, False), (0.1, 0.009, False)],
)
def test_the_dearer_route_counts_and_each_bound_holds(
    step_s: float, chat_s: float, is_good: bool
) -> None:
    direct = window("direct", 0.1, 0.002, 0.002)
    gateway = window("gateway", step_s, chat_s, 0.004)
    proxy = window("proxy", 0.2, 0.003, 0.004)
    line, good = _result([direct, gateway, proxy, proxy, gateway, direct])
    assert good is is_good
    assert line == {
        "turns_per_cpu_s": 250.0,
        "added_ms_p50": round(1e3 * (chat_s - 0.002), 2),
        "added_ms_p99": round(1e3 * (chat_s - 0.002), 2),
        "trainer_slowdown": round(step_s / 0.1 - 1, 4),
        "proxy_ms_p50": 2.0,
        "proxy_ms_p99": 2.0,
    }


@pytest.mark.runs
def test_turns_through_the_gateway_are_journalled_before_they_are_answered(tmp_path: Path) -> None:
    with sessions(tmp_path, Load(at_a_time=2, samples=1, seed=0)) as (inference, of):
        direct = inference.thread.run(of.run(0.6, "direct"))
        passed_on = inference.thread.run(of.run(0.6, "proxy"))
        through = inference.thread.run(of.run(0.6, "gateway"))
    assert direct.number == passed_on.number == through.number == 2 * NUM_TURNS
    (file,) = [JournalFile(0, 0, path) for path in tmp_path.glob("*.turns")]
    turns = list(read_turns(file))
    assert len(turns) == through.number
    assert all(len(turn.completion.token_ids) == SAMPLED_TOKENS for turn in turns)
