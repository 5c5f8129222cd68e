"""What lies between loaded and proved weights makes no token, whatever becomes of the trainer."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import orjson
import pytest
import requests
import torch

from easyrl.config import SHARED_MEMORY
from easyrl.inference_client.errors import Outage
from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.routes import EmbeddedServer
from easyrl.inference_client.servers.embedded.server import start_site
from easyrl.inference_client.transfer.artifact import HEADER_BYTES
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import NoEndpointServes, PolicyVersion
from tests.easyrl.weight_sync.weight_sync_parts import (
    PROVE,
    PlainEngine,
    Watched,
    stamps,
    wait_until,
    weight_sync,
)
from tests.end_to_end.proxy import GENERATE, reply

V0, V1 = PolicyVersion("sync", 0, 0), PolicyVersion("sync", 0, 1)
FLIPPED = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def in_memory() -> Iterator[Path]:
    folder = SHARED_MEMORY / f"easyrl-test-owed-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@contextmanager
def served(model_dir: Path) -> Iterator[tuple[EmbeddedEngine, str]]:
    """A server of this test alone, and its URL: others would meet what it owes."""
    engine = EmbeddedEngine(model_dir)
    with LoopThread("server") as thread:
        runner, url = thread.run(start_site(EmbeddedServer(engine, "m").app(), "127.0.0.1", 0))
        try:
            yield engine, url
        finally:
            thread.run(runner.cleanup())
            engine.close()


def ask(url: str) -> requests.Response:
    """A request that comes past the run, as another rank's or a stranger's."""
    body = {"token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 4, "logprobs": 0}}
    return requests.post(url + GENERATE, json=body, timeout=30)


def assert_refuses(engine: EmbeddedEngine, url: str) -> None:
    assert not requests.get(f"{url}/is_paused", timeout=30).json()["is_paused"]
    num_tokens = engine.stats.generated_tokens
    answer = ask(url)
    assert answer.status_code == 503
    assert engine.stats.generated_tokens == num_tokens


def assert_mends(model_dir: Path, url: str, folder: Path, **options) -> None:
    """Another run, whose weights are in another folder, brings the server back."""
    with weight_sync(PlainEngine(model_dir), [url], folder, **options) as other:
        other.sync.publish(V0)
        assert stamps(other.generate(str(V0)).result(60)) == {str(V0)}
    assert ask(url).status_code == 200


class FlipsABit(Watched):
    """In the file of ``FLIPPED``, before the server reads it; in every push while it ``flips``."""

    flips = False

    async def answer(self, request, body):
        await super().answer(request, body)
        if self.flips and request.path == "/update_weights" and b"abandon" not in body:
            info = orjson.loads(body)["update_info"]
            for chunk in info["chunks"]:
                if FLIPPED in chunk["checksums"]:
                    flip(Path(self.inits[-1]["root"]) / info["artifact"] / chunk["file"])
        return None


def flip(file: Path) -> None:
    """The lowest bit of the first number of the first tensor in ``file``."""
    with file.open("r+b") as opened:
        opened.seek(HEADER_BYTES)
        (first,) = opened.read(1)
        opened.seek(HEADER_BYTES)
        opened.write(bytes([first ^ 1]))


class LosesTheLastAnswer(FlipsABit):
    """While it ``loses``, the server hears of an update's end, and the trainer does not."""

    loses = False
    statuses: list[int]

    async def answer(self, request, body):
        await super().answer(request, body)
        if self.loses and request.path == "/finish_weight_update":
            response = await self.forward(request.method, request.path_qs, body)
            assert response.status == 200
            return reply({"error": "lost"}, status=500)
        if self.loses and request.path == "/resume":
            response = await self.forward(request.method, request.path_qs)
            asked = {"token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 4, "logprobs": 0}}
            self.statuses.append((await self.forward("POST", GENERATE, asked)).status)
            self.loses = self.flips = False
            return response
        return None


@pytest.mark.parametrize("flips", [False, True])
def test_an_update_whose_last_answer_is_lost_makes_no_token(model_dir, in_memory, flips):
    with served(model_dir) as (engine, url), closing(LosesTheLastAnswer(url)) as proxy:
        proxy.statuses = []
        with weight_sync(PlainEngine(model_dir), [proxy.url], in_memory) as rank:
            rank.sync.publish(V0)
            rank.sync.engine.train(1e-3)
            proxy.loses, proxy.flips = True, flips
            rank.sync.publish(V1)  # pushed again; with the bit flipped it was written again
            assert proxy.statuses == [503] and engine.weights.broken is None
            assert stamps(rank.generate(str(V1)).result(60)) == {str(V1)}


def test_weights_that_fail_the_proof_make_no_token(model_dir, in_memory, tmp_path):
    """Damaged where they were written, each time: nobody was to blame, and nobody serves."""
    with served(model_dir) as (engine, url), closing(FlipsABit(url)) as proxy:
        with weight_sync(PlainEngine(model_dir), [proxy.url], in_memory) as rank:
            rank.sync.publish(V0)
            proxy.flips = True
            with pytest.raises(Outage, match="was changed after it was written"):
                rank.sync.publish(V1)
        assert_refuses(engine, url)  # the end of the run has resumed it
        assert_mends(model_dir, url, tmp_path)


def test_one_that_is_excluded_for_its_bits_makes_no_token(model_dir, in_memory, tmp_path):
    """Its own memory flips a bit, behind each push."""
    with served(model_dir) as (engine, url):

        class Flips(Watched):
            async def answer(self, request, body):
                await super().answer(request, body)
                if request.path == PROVE and len(self.given) > 2:  # behind the probe and V0
                    weight = engine._model.get_parameter(FLIPPED).data
                    weight.view(torch.int32)[2, 3] ^= 1
                return None

        with closing(Flips(url)) as proxy:
            with weight_sync(PlainEngine(model_dir), [proxy.url], in_memory) as rank:
                rank.sync.publish(V0)
                with pytest.raises(NoEndpointServes, match="serves other weights"):
                    rank.sync.publish(V1)
                assert_refuses(engine, url)  # excluded, it was let go
        assert_mends(model_dir, url, tmp_path)


class DiesBeforeTheProof(Watched):
    """Cuts the trainer off when it asks for the proof of ``V1``: the server hears no more."""

    is_dead = False

    async def answer(self, request, body):
        await super().answer(request, body)
        if request.path == PROVE and str(V1) in self.given:
            self.is_dead = True
        return reply({"error": "cut off"}, status=502) if self.is_dead else None


@pytest.mark.parametrize("prove", [True, False])
def test_a_trainer_that_dies_before_the_proof_leaves_no_token_and_others_mend_it(
    model_dir, in_memory, tmp_path, monkeypatch, prove
):
    monkeypatch.setattr("easyrl.weight_sync.push.RETRY_PAUSES_S", (0.001,) * 4)
    with served(model_dir) as (engine, url), closing(DiesBeforeTheProof(url)) as proxy:
        options = {"max_outage_s": 0.5}
        with weight_sync(PlainEngine(model_dir), [proxy.url], in_memory, **options) as rank:
            rank.sync.publish(V0)
            dying = threading.Thread(target=lambda: _until_dead(rank), daemon=True)
            dying.start()
            wait_until(lambda: proxy.is_dead)
            assert requests.get(f"{url}/is_paused", timeout=30).json()["is_paused"]
            requests.post(f"{url}/resume", timeout=30)  # by an operator
            assert_refuses(engine, url)
            dying.join(60)
        assert_refuses(engine, url)
        assert_mends(model_dir, url, tmp_path, prove=prove)


def _until_dead(rank) -> None:
    with pytest.raises((Outage, NoEndpointServes)):
        rank.sync.publish(V1)


def test_one_that_a_dead_trainer_has_paused_goes_on_when_it_returns(model_dir, in_memory):
    """Another run's died between its pause and its stamp: weights and stamp are still ours."""
    with served(model_dir) as (_, url):
        with weight_sync(PlainEngine(model_dir), [url], in_memory) as rank:
            rank.sync.publish(V0)
            requests.post(f"{url}/pause?mode=wait", timeout=30)

            async def lose() -> None:
                (endpoint,) = rank.pool.endpoints
                rank.pool._lose_confirmation(endpoint, str(V0), "test")

            rank.thread.run(lose())
            wait_until(lambda: rank.statuses()[url] == f"confirmed {V0}")
            assert stamps(rank.generate(str(V0)).result(60)) == {str(V0)}
