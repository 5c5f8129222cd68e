"""Endpoints that take no weights, other weights, or say that they have what they have not."""

from __future__ import annotations

import asyncio
import time

import orjson

from benchmarks.parts.hostile.behaviour import RESPONSES, NotNow, endpoint
from benchmarks.parts.hostile.endpoint import Answer, Exchange

PROOF = "/collective_rpc"
AWAY_S, BACK_FOR_S = 6.0, 6.0  # at least, of an endpoint that restarts again and again
LATE_S = 3.0  # of weight_sync.timeout_s, 8
QUICK = (*RESPONSES, "/health", "/v1/models", "/metrics", "/weight_info")
MESSAGE = b'{"message": "done"}'


@endpoint("weights", "/update_weights")
async def update_ignored(exchange: Exchange) -> None:
    """200 to every update of the weights; none is applied."""
    await exchange.answer(MESSAGE)


@endpoint("weights", "/start_weight_update", "/update_weights", "/finish_weight_update")
async def old_weights_kept(exchange: Exchange) -> None:
    """200 to a whole update; the old weights go on under the new version."""
    if exchange.request.path == "/finish_weight_update":
        version = exchange.request.json["weight_version"]
        body = orjson.dumps({"new_version": version})
        request = type(exchange.request)("POST", "/update_weight_version", {}, body)
        await exchange.endpoint.forward(request)
    await exchange.answer(MESSAGE)


@endpoint("weights", "/update_weights")
async def update_hangs(exchange: Exchange) -> None:
    """An update that is never answered."""
    await exchange.hold()


@endpoint("weights")
async def every_answer_late(exchange: Exchange) -> None:
    """Each answer about weights is right and seconds late, in time by itself; looks are quick."""
    if exchange.request.path in QUICK:
        raise NotNow
    await asyncio.sleep(LATE_S)
    await exchange.answer(await exchange.forward())


@endpoint("weights", "/update_weights", share=0.7)
async def update_fails(exchange: Exchange) -> None:
    """500 in the middle of an update."""
    await exchange.answer(b'{"error": "CUDA out of memory"}', "500 Internal Server Error")


@endpoint("weights", "/start_weight_update")
async def update_always_open(exchange: Exchange) -> None:
    """400 to the start of an update: one is open, it says, whatever was done about it."""
    await exchange.answer(b'{"error": "a weight update is open"}', "400 Bad Request")


@endpoint("weights", "/finish_weight_update")
async def update_never_finished(exchange: Exchange) -> None:
    """200 to the end of an update, which stays open."""
    await exchange.answer(MESSAGE)


@endpoint("weights", "/pause")
async def pause_ignored(exchange: Exchange) -> None:
    """200 to a pause; it goes on."""
    await exchange.answer(MESSAGE)


@endpoint("weights", "/resume")
async def never_resumed(exchange: Exchange) -> None:
    """200 to a resume; it stays paused, and answers no request."""
    await exchange.answer(MESSAGE)


@endpoint("weights", "/update_weight_version")
async def stamp_ignored(exchange: Exchange) -> None:
    """Success to a new version, which it does not take."""
    await exchange.answer(b'{"success": true}')


@endpoint("weights", "/reset_prefix_cache")
async def cache_in_use(exchange: Exchange) -> None:
    """The prefix cache can never be reset."""
    await exchange.answer(b'{"success": false}')


@endpoint("weights", PROOF)
async def proof_of_no_worker(exchange: Exchange) -> None:
    """A proof without workers."""
    await exchange.answer(b'{"results": []}')


@endpoint("weights", PROOF)
async def proof_of_nothing(exchange: Exchange) -> None:
    """A proof whose worker names no tensor and no problem."""

    def forget(tree: dict) -> None:
        for result in tree["results"]:
            for name, value in result.items():
                if isinstance(value, dict | list):
                    result[name] = type(value)()

    await exchange.answer((await exchange.forward()).changed(forget))


@endpoint("weights", PROOF)
async def proof_repeated(exchange: Exchange) -> None:
    """The proof that it gave when it was first asked, again."""
    kept = exchange.endpoint.history.get(PROOF)
    if not kept or kept[0][0].body == exchange.request.body:
        raise NotNow
    await exchange.answer(kept[0][1])


@endpoint("weights", PROOF)
async def proof_of_huge_numbers(exchange: Exchange) -> None:
    """A proof with a number of four hundred digits in every field."""
    await exchange.answer(b'{"results": [{"checksums": ' + b"9" * 400 + b', "transport": 1}]}')


@endpoint("weights", PROOF)
async def proof_of_a_million_workers(exchange: Exchange) -> None:
    """A proof with a million empty workers."""
    await exchange.answer(b'{"results": [' + b"{}," * 1_000_000 + b"{}]}")


@endpoint("weights", PROOF)
async def proof_of_foreign_tensors(exchange: Exchange) -> None:
    """A proof of tensors that the run has not."""
    answer = await exchange.forward()
    await exchange.answer(Answer(200, answer.body.replace(b"model.", b"other.")))


@endpoint("weights", *RESPONSES, both=True)
async def restart_with_other_weights(exchange: Exchange) -> None:
    """It restarts in mid-batch, at a request for responses, and comes back with another model."""
    server = exchange.endpoint
    _once(exchange)
    await server.restart(server.other_model)
    exchange.reset()


@endpoint("weights")
async def restarts_for_seconds(exchange: Exchange) -> None:
    """It restarts at a request for responses, is away for seconds, comes back; and again later."""
    server, now_s = exchange.endpoint, time.monotonic()
    if now_s >= server.back_s:
        if exchange.request.path not in RESPONSES or now_s < server.back_s + BACK_FOR_S:
            raise NotNow
        server.back_s = now_s + AWAY_S
        await server.restart(server.model)
    exchange.reset()


@endpoint("weights", *RESPONSES, may_end_75=True, both=True)
async def weights_changed_in_silence(exchange: Exchange) -> None:
    """Its weights change in mid-batch, under the version that it has proved."""
    server = exchange.endpoint
    _once(exchange)
    engine = server.engine
    assert engine is not None

    def change() -> None:
        for tensor in engine.weights._tensors.values():
            tensor.mul_(1.5)

    await asyncio.wrap_future(engine.weights._between_steps(change))
    await exchange.answer(await exchange.forward())


@endpoint("weights", "/v1/models", *RESPONSES, both=True)
async def context_of_one(exchange: Exchange) -> None:
    """A context of one token, claimed after a failure that makes the run ask again."""
    await _claim(exchange, 1)


@endpoint("weights", "/v1/models", *RESPONSES, both=True)
async def negative_context(exchange: Exchange) -> None:
    """A context of -1 tokens, claimed likewise."""
    await _claim(exchange, -1)


@endpoint("weights", "/v1/models", *RESPONSES, both=True)
async def huge_context(exchange: Exchange) -> None:
    """A context of 10^30 tokens, claimed likewise."""
    await _claim(exchange, 10**30)


@endpoint("weights", "/v1/models", *RESPONSES, both=True)
async def no_model(exchange: Exchange) -> None:
    """A list without models, claimed likewise."""
    if exchange.request.path in RESPONSES:
        return await _fail_once(exchange)
    await exchange.answer(b'{"data": []}')


async def _claim(exchange: Exchange, max_model_len: int) -> None:
    if exchange.request.path in RESPONSES:
        return await _fail_once(exchange)
    answer = await exchange.forward()
    here = answer.json["data"][0]["max_model_len"]
    await exchange.answer(
        answer.replaced(b'"max_model_len":%d' % here, b'"max_model_len":%d' % max_model_len)
    )


async def _fail_once(exchange: Exchange) -> None:
    """The next look asks which model it serves."""
    _once(exchange)
    await exchange.answer(b"", "500 Internal Server Error")


def _once(exchange: Exchange) -> None:
    if exchange.endpoint.has_failed:
        raise NotNow
    exchange.endpoint.has_failed = True
