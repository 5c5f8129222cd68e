"""The embedded server's stream of samples: the same samples, sent as they finish."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from benchmarks.parts.random_model import write_random_model
from easyrl.inference_client.sample_stream import SAMPLES
from easyrl.inference_client.servers.embedded.requests import GenerationRequest
from easyrl.runtime.frames import FrameSplitter
from tests.inference_client.pool_cases import until
from tests.inference_client.test_embedded_server import generate_body, post, serving


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=2)


async def streamed(http: aiohttp.ClientSession, body: Any) -> list[list[Any]]:
    """The samples of each frame."""
    frames, read = [], FrameSplitter()
    async with http.post(SAMPLES, json=body) as response:
        assert response.status == 200, await response.text()
        async for part in response.content.iter_any():
            frames += [msgspec.msgpack.decode(payload) for payload in read.feed(part)]
    return frames


def samples_body(*prompts: tuple[list[int], list[int]], **sampling: Any) -> dict[str, Any]:
    asked = [{"token_ids": token_ids, "seeds": seeds} for token_ids, seeds in prompts]
    params = {"max_tokens": 8, "ignore_eos": True, **sampling}
    return {"request_id": "r", "prompts": asked, "sampling_params": params}


async def test_streamed_samples_are_those_that_single_requests_give(model_dir: Path) -> None:
    async with serving(model_dir) as (http, _, _):
        asked = [([1, 2, 3], [5, 6]), ([4, 5], [7])]
        frames = await streamed(http, samples_body(*asked))
        by_index = {one[1]: one for frame in frames for one in frame}
        assert sorted(by_index) == [0, 1, 2]
        single = [(ids, seed) for ids, seeds in asked for seed in seeds]
        for index, (ids, seed) in enumerate(single):
            body = generate_body(seed=seed) | {"token_ids": ids}
            _, reply = await post(http, "/inference/v1/generate", body)
            (choice,) = reply["choices"]
            _, _, finish_reason, token_ids, logprobs, spans, num_prompt_tokens = by_index[index]
            assert num_prompt_tokens == len(ids)
            assert finish_reason == "length" and spans == [["default", 0, 8]]
            assert np.frombuffer(token_ids, "<i4").tolist() == choice["token_ids"]
            expected = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            # the batches differ, and with them the order of some sums
            np.testing.assert_allclose(np.frombuffer(logprobs, "<f4"), expected, atol=1e-5)


async def test_a_sample_is_sent_when_it_has_finished(model_dir: Path) -> None:
    """One of two has waited for a place: the other's frame came first."""
    async with serving(model_dir, max_num_seqs=1) as (http, _, _):
        # long enough that the first is on its way meanwhile, on a busy machine too
        frames = await streamed(http, samples_body(([1, 2, 3], [5, 6]), max_tokens=200))
        assert [[one[1] for one in frame] for frame in frames] == [[0], [1]]


async def test_a_prompt_that_cannot_be_served_is_refused_alone(model_dir: Path) -> None:
    async with serving(model_dir, max_queue=2, max_model_len=100) as (http, _, engine):
        await asyncio.wrap_future(engine.pause("keep"))  # nothing leaves the queue
        body = samples_body(([1, 99], [1]), ([1, 2], [2]), ([0] * 300, [3]), ([3], [4, 5]))
        reading = asyncio.ensure_future(streamed(http, body))
        await until(lambda: engine.num_waiting == 2)
        engine.resume()
        ended = {one[1]: one for frame in await reading for one in frame}
        assert [ended[index][0] for index in range(5)] == [1, 0, 1, 0, 1]
        assert ended[0][2] == 400 and "out of vocabulary" in ended[0][3]
        assert ended[2][2] == 400 and "maximum model length" in ended[2][3]
        assert ended[4][2] == 503 and "the queue holds 2" in ended[4][3]


async def test_a_client_that_hangs_up_aborts_the_rest_and_an_id_aborts_one(
    model_dir: Path,
) -> None:
    async with serving(model_dir) as (http, _, engine):
        await asyncio.wrap_future(engine.pause("keep"))
        reading = asyncio.ensure_future(streamed(http, samples_body(([1], [1, 2, 3]))))
        await until(lambda: engine.num_waiting == 3)
        body = {"request_ids": ["r-1"]}
        assert (await post(http, "/inference/v1/abort_requests", body))[1]["aborted"] == 1
        await until(lambda: engine.num_waiting == 2)
        reading.cancel()
        await until(lambda: engine.num_waiting == 0)
        engine.resume()
        (frame,) = await streamed(http, samples_body(([1], [1])))  # it goes on
        assert frame[0][1] == 0


async def test_who_sees_the_status_can_abort_any_sample(model_dir: Path) -> None:
    async with serving(model_dir) as (http, _, engine):
        await asyncio.wrap_future(engine.pause("keep"))
        async with http.post(SAMPLES, json=samples_body(([1], list(range(20))))) as response:
            assert response.status == 200
            body = {"request_ids": [f"r-{number}" for number in range(20)]}
            assert (await post(http, "/inference/v1/abort_requests", body))[1]["aborted"] == 20


async def test_what_was_sent_is_not_kept_until_the_stream_ends(model_dir: Path) -> None:
    async with serving(model_dir, max_num_seqs=1) as (http, _, engine):
        kept: list[weakref.ref] = []  # what becomes the samples of each request
        submit = engine.submit_together

        def noting(requests: list[GenerationRequest]) -> Any:
            kept.extend(weakref.ref(request.future) for request in requests)
            # the second is held back when the first has been sent
            requests[0].future.add_done_callback(lambda _: engine.pause("keep"))
            return submit(requests)

        engine.submit_together = noting  # type: ignore[method-assign]
        read = FrameSplitter()
        async with http.post(SAMPLES, json=samples_body(([1, 2, 3], [5, 6]))) as response:
            while not list(read.feed(await response.content.readany())):
                pass
            await until(lambda: kept[0]() is None)
            assert kept[1]() is not None
            engine.resume()
            while not list(read.feed(await response.content.readany())):
                pass


async def test_an_aborted_sample_says_so(model_dir: Path) -> None:
    async with serving(model_dir) as (http, _, engine):
        await asyncio.wrap_future(engine.pause("keep"))
        reading = asyncio.ensure_future(streamed(http, samples_body(([1], [1, 2]))))
        await until(lambda: engine.num_waiting == 2)
        await post(http, "/inference/v1/abort_requests", {"request_ids": ["r-0"]})
        engine.resume()
        reasons = {one[1]: one[2] for frame in await reading for one in frame}
        assert reasons == {0: "abort", 1: "length"}


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": [{"token_ids": [1], "seeds": []}]}, "prompts.0.seeds"),
        ({"prompts": [{"token_ids": [], "seeds": [1]}]}, "prompts.0.token_ids"),
        ({"prompts": [{"token_ids": [1], "seeds": [2**31]}]}, "prompts.0.seeds.0"),
        ({"sampling_params": {"n": 2, "max_tokens": 4}}, "prompts have seeds"),
        ({"sampling_params": {"seed": 1, "max_tokens": 4}}, "prompts have seeds"),
        ({"sampling_params": {}}, "max_tokens is needed"),
        ({"sampling_params": {"max_tokens": 4, "logit_bias": {"1": 2}}}, "logit_bias"),
    ],
)
async def test_a_request_for_samples_that_is_wrong_is_refused(
    model_dir: Path, changes: dict, field: str
) -> None:
    async with serving(model_dir) as (http, _, _):
        status, reply = await post(http, SAMPLES, samples_body(([1], [1])) | changes)
        assert status == 400 and field in reply["error"]["message"]
