"""In strict mode only endpoints whose responses depend on nothing else may take part."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from easyrl.build.invariant_endpoints import ENDPOINTS_ARITHMETIC_FILE, require_invariant_endpoints
from easyrl.config import Config, ConfigError
from easyrl.config.file import validate_config
from tests.inference_client.fake_endpoint import FakeEndpoint
from tests.inference_client.pool_cases import V1, ask, pool_of, repairer, until

HERE, ELSEWHERE = "torch 2.13.0, AVX512, 1 thread", "torch 2.13.0, AVX2, 1 thread"


@pytest.fixture
def config(tmp_path) -> Config:
    return strict(tmp_path)


def strict(folder: Any, determinism: str = "strict") -> Config:
    return validate_config(
        {
            "run": {"determinism": determinism},
            "model": {"path": str(folder)},
            "data": {"files": [str(folder / "prompts.jsonl")]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
        }
    )


def embedded(*, batch_invariant: bool = True, arithmetic: str = HERE) -> FakeEndpoint:
    card = {"owned_by": "easyrl", "batch_invariant": batch_invariant, "arithmetic": arithmetic}
    return FakeEndpoint(version=V1, card=card)


async def all_answer(pool: Any) -> None:
    await until(lambda: all(e.served and e.is_up for e in pool.endpoints))


async def test_batch_invariant_servers_are_taken(config, caplog):
    async with pool_of(embedded(), embedded()) as pool:
        await all_answer(pool)
        require_invariant_endpoints(config, pool)
        await ask(pool, 1)
    assert not [r for r in caplog.records if r.name == "easyrl.build.invariant_endpoints"]


async def test_another_embedded_server_is_refused(config, tmp_path):
    bad = embedded(batch_invariant=False)
    async with pool_of(embedded(), bad) as pool:
        await all_answer(pool)
        require_invariant_endpoints(strict(tmp_path, "none"), pool)  # all the same there
        with pytest.raises(ConfigError, match=f"{bad.url} decodes .* --batch-invariant") as error:
            require_invariant_endpoints(config, pool)
        assert "inference.endpoints:" in str(error.value)
        assert "run.determinism=none" in str(error.value)


async def test_servers_that_compute_differently_are_refused(config):
    first, second = embedded(), embedded(arithmetic=ELSEWHERE)
    async with pool_of(first, second) as pool:
        await all_answer(pool)
        said = f"{second.url} computes with {ELSEWHERE}, {first.url} with {HERE}"
        with pytest.raises(ConfigError, match=said):
            require_invariant_endpoints(config, pool)


async def test_an_attempt_whose_endpoints_compute_otherwise_is_told(config, tmp_path, caplog):
    kept = tmp_path / ENDPOINTS_ARITHMETIC_FILE

    async def attempt(arithmetic: str, *, late: bool = False) -> None:
        server = embedded(arithmetic=arithmetic)
        async with pool_of(server) as pool:
            if not late:
                await all_answer(pool)
            assert all((e.served is None) == late for e in pool.endpoints)
            require_invariant_endpoints(config, pool, tmp_path)
            await all_answer(pool)
            asked = len(server.calls)
            await until(lambda: len(server.calls) > asked + 2)  # looked at again

    with caplog.at_level(logging.WARNING, "easyrl.build.invariant_endpoints"):
        await attempt(HERE)
        assert kept.read_text() == HERE + "\n"
        await attempt(HERE)
        assert not [r for r in caplog.records if r.name == "easyrl.build.invariant_endpoints"]
        for late in (False, True):
            caplog.clear()
            await attempt(ELSEWHERE, late=late)
            (record,) = [r for r in caplog.records if r.name == "easyrl.build.invariant_endpoints"]
            assert f"with {ELSEWHERE}, the first one's did with {HERE}" in record.message
    assert kept.read_text() == HERE + "\n"


async def test_where_it_cannot_be_kept_endpoints_are_used_all_the_same(config, tmp_path, caplog):
    async with pool_of(embedded()) as pool:
        await all_answer(pool)
        require_invariant_endpoints(config, pool, tmp_path / "is-not-there")
        await ask(pool, 1)
    assert "cannot be kept for later attempts" in caplog.text


async def test_vllm_is_warned_of_once(config, caplog):
    vllm = FakeEndpoint(version=V1, card={"owned_by": "vllm"})
    async with pool_of(vllm) as pool:
        await all_answer(pool)
        with caplog.at_level(logging.WARNING, "easyrl.build.invariant_endpoints"):
            require_invariant_endpoints(config, pool)
            asked = len(vllm.calls)
            await until(lambda: len(vllm.calls) > asked + 2)  # looked at again
        await ask(pool, 1)
    (record,) = [r for r in caplog.records if r.name == "easyrl.build.invariant_endpoints"]
    assert vllm.url in record.message and "only the trainer's side is exact" in record.message


async def test_one_that_comes_later_and_may_not_is_excluded(config):
    good, late = embedded(), embedded(batch_invariant=False)
    async with pool_of(good) as pool, late:
        repair = repairer(pool)
        pool.set_repair(repair)
        await all_answer(pool)
        require_invariant_endpoints(config, pool)
        endpoint = pool.add(late.url)
        await until(lambda: endpoint.excluded is not None)
        assert "--batch-invariant" in endpoint.excluded
        answers = [await ask(pool, seed) for seed in range(4)]
        assert {answer.endpoint for answer in answers} == {good.url}
        assert not repair.repaired and not late.requests
