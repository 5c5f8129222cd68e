"""Clients that send what they should not, too much of it, or the same again."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from typing import Any

import aiohttp

from benchmarks.parts.hostile.episodes.catalogue import behaviour
from benchmarks.parts.hostile.episodes.scene import CHAT, FIRST, MAX_TOKENS, TOKENS, Scene
from benchmarks.parts.hostile.episodes.turns import behave, first_turn, talk

HUGE = 17 * 2**20  # bytes; a body may have 16 MB
NUM_FLOOD, NUM_SESSIONS = 300, 1000
QUESTION = [{"role": "user", "content": "12"}]


@behaviour("request")
async def malformed_bodies(scene: Scene) -> float:
    """Bodies that are no JSON, no object, nested ten thousand times, or not UTF-8."""
    bodies = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{" * 10**4, b"[" * 10**5]
    for route in (CHAT, TOKENS):
        for body in bodies:
            await scene.refused(400, route, body)
        await scene.refused(400, route, b'{"messages":' + b"[" * 10**4 + b"]" * 10**4 + b"}")
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def huge_bodies(scene: Scene) -> float:
    """17 MB, announced and not announced, twice at once."""

    async def drip() -> Any:
        for _ in range(HUGE // 2**16):
            yield b" " * 2**16

    async def unannounced() -> None:
        headers = {"Authorization": f"Bearer {scene.key}"}
        try:
            async with scene.http.post(scene.url + CHAT, data=drip(), headers=headers) as response:
                scene.check(response.status == 413, f"{response.status} to an endless body")
        except aiohttp.ClientError:  # it was hung up on while it still wrote
            pass

    async def announced() -> None:
        try:
            await scene.refused(413, CHAT, b" " * HUGE)
        except aiohttp.ClientError:
            pass

    await asyncio.gather(*(each() for each in (announced, unannounced) * 2))
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def huge_headers(scene: Scene) -> float:
    """A header of 100 kB, and a thousand of them."""
    for headers in ({"X-Long": "a" * 100_000}, {f"X-{n}": "a" for n in range(1000)}):
        try:
            body = {"token_ids": FIRST, "return_token_ids": True}
            status, answer = await scene.ask(TOKENS, body, **headers)
        except aiohttp.ClientError:
            continue
        if status == 200:  # a thousand may be taken
            scene.answered(answer)
        scene.check(status < 500, f"{status} to huge headers")
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def packed_bodies(scene: Scene) -> float:
    """A gzip bomb, and encodings that nobody knows."""
    bomb = gzip.compress(b" " * 2**26)
    for encoding in ("gzip", "deflate", "br", "made-up"):
        try:
            status, _ = await scene.ask(CHAT, bomb, Content_Encoding=encoding)
        except aiohttp.ClientError:  # it was hung up on while it still wrote
            continue
        scene.check(status in (400, 415), f"{status} to {encoding}")
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def token_ids_out_of_the_vocabulary(scene: Scene) -> float:
    """Prompts with token ids that the model has not."""
    for ids in ([10**6], [*FIRST, 2**31 - 1]):
        await scene.refused(400, TOKENS, {"token_ids": ids})
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def token_ids_that_are_none(scene: Scene) -> float:
    """Prompts of negative ids, of 2^31, 10^40, fractions, texts, booleans, of nothing."""
    for ids in ([-1], [2**31], [10**40], [1.5], ["1"], [True], [None], [[1]], [], {}, None, "12"):
        await scene.refused(400, TOKENS, {"token_ids": ids})
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def prompts_beyond_the_context(scene: Scene) -> float:
    """A hundred thousand token ids, and a chat of as many characters."""
    await scene.refused(400, TOKENS, {"token_ids": [5] * 100_000})
    long = [{"role": "user", "content": "1" * 100_000}]
    status, answer = await scene.ask(CHAT, {"messages": long})
    code = answer["error"]["code"] if isinstance(answer, dict) and "error" in answer else None
    scene.check((status, code) == (400, "context_length_exceeded"), f"{status}: {answer}")
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def other_sampling(scene: Scene) -> float:
    """Temperature, seed, logit bias and what else is training's."""
    asked: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 1,
        "min_p": 0.5,
        "seed": 1,
        "n": 2,
        "logit_bias": {"5": 100},
        "presence_penalty": 2,
        "response_format": {"type": "json_object"},
        "guided_regex": "1+",
        "tool_choice": "required",
        "top_logprobs": 5,
    }
    for name, value in asked.items():
        await scene.refused(400, CHAT, {"messages": QUESTION, name: value})
        if name not in ("tool_choice", "top_logprobs"):
            sampling = {"sampling_params": {name: value}}
            await scene.refused(400, TOKENS, {"token_ids": FIRST, **sampling})
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def odd_limits(scene: Scene) -> float:
    """``max_tokens`` 0, negative, a text and a million; stops of other types, too many of them."""
    for limit in (0, -1, "8", 1.5, [1]):
        await scene.refused(400, CHAT, {"messages": QUESTION, "max_tokens": limit})
        params = {"sampling_params": {"max_tokens": limit}}
        await scene.refused(400, TOKENS, {"token_ids": FIRST, **params})
    for stop in ({"a": 1}, [1], ["x"] * 1000, [""], "y" * 10**5):
        await scene.refused(400, CHAT, {"messages": QUESTION, "stop": stop})
    made = await scene.tokens(FIRST, max_tokens=10**6)
    scene.check(len(made) <= MAX_TOKENS, f"{len(made)} tokens")
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def odd_chats(scene: Scene) -> float:
    """Messages without a role, with images, NUL, half a surrogate pair, ids of tools; tools too."""
    chats: list[Any] = [
        [],
        [{}],
        [{"content": "1"}],
        ["1"],
        [{"role": 1, "content": "1"}],
        [{"role": "user", "content": {"a": 1}}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "content": None, "tool_calls": 7}],
    ]
    for messages in chats:
        await scene.refused(400, CHAT, {"messages": messages})
    for tools in (7, [{}], [{"function": {}}]):
        await scene.refused(400, CHAT, {"messages": QUESTION, "tools": tools})
    for text in ("\x00\x01", "\ud800", "\u202e1", ""):
        status, answer = await scene.ask(CHAT, {"messages": [{"role": "user", "content": text}]})
        scene.check(status in (200, 400), f"{status} to {text!r}: {str(answer)[:200]}")
    scene.happened()
    return scene.reward


@behaviour("request")
async def other_routes(scene: Scene) -> float:
    """Paths and methods that are none, and ways out of its own path."""
    for path in (
        "/v1/completions",
        "/../../etc/passwd",
        "/v1/%00",
        "/v1//models",
        "/" + "a" * 5000,
    ):
        status, _ = await scene.ask(path, {})
        scene.check(400 <= status < 500, f"{status} to {path[:40]}")
    for method in ("PUT", "DELETE", "PATCH", "TRACE"):
        async with scene.http.request(method, scene.url + CHAT) as response:
            scene.check(response.status == 405, f"{response.status} to {method}")
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def wrong_keys(scene: Scene) -> float:
    """No key, another one, one of a megabyte's beginning, one that is no text."""
    for key in ("", "wrong", scene.key[:-1], scene.key + "0", "a" * 4000, "é"):
        await scene.refused(401, TOKENS, {"token_ids": FIRST}, key=key)
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def key_of_another_session(scene: Scene) -> float:
    """Its own key for another's session, and another's key for its own."""
    await first_turn(scene)
    others = {url: key for url, key in Scene.keys.items() if url != scene.url}
    for url, key in list(others.items())[-3:]:  # of its host; maybe over by now
        await scene.refused(401, TOKENS, {"token_ids": FIRST}, url=url)
        await scene.refused(401, TOKENS, {"token_ids": FIRST}, key=key)
        scene.happened()
    return await behave(scene)


@behaviour("request")
async def a_thousand_sessions(scene: Scene) -> float:
    """A thousand sessions that it makes up: 404 each."""
    root = scene.url.rpartition("/")[0]

    async def ask(number: int) -> int:
        url = f"{root}/{number:032x}"
        return (await scene.ask(TOKENS, {"token_ids": FIRST}, url=url))[0]

    for start in range(0, NUM_SESSIONS, 100):
        statuses = Counter(await asyncio.gather(*(ask(start + n) for n in range(100))))
        scene.check(statuses == {404: 100}, str(statuses))
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def floods(scene: Scene) -> float:
    """Three hundred requests at once."""

    async def ask(number: int) -> int:
        body = {"token_ids": [*FIRST, number % 9 + 5], "sampling_params": {"max_tokens": 2}}
        status, answer = await scene.ask(TOKENS, {**body, "return_token_ids": True})
        if status == 200:
            scene.answered(answer)
        return status

    statuses = Counter(await asyncio.gather(*map(ask, range(NUM_FLOOD))))
    scene.check({200, 400} <= set(statuses) <= {200, 400, 429}, str(statuses))
    scene.happened(str(statuses))
    return scene.reward


@behaviour("request")
async def the_same_request_id(scene: Scene) -> float:
    """A request three times with one id, twice at once: one turn, one answer; another body: 422."""
    body = {"token_ids": FIRST, "sampling_params": {"max_tokens": 4}, "return_token_ids": True}
    both = await asyncio.gather(*(scene.ask(TOKENS, body, X_Request_Id="one") for _ in range(2)))
    again = await scene.ask(TOKENS, body, Idempotency_Key="one")
    scene.check(both[0] == both[1] == again and again[0] == 200, str((both, again))[:400])
    scene.answered(again[1])
    await scene.refused(422, TOKENS, {"token_ids": [5]}, X_Request_Id="one")
    await scene.refused(400, TOKENS, body, X_Request_Id="x" * 5000)
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def another_request_id(scene: Scene) -> float:
    """The same request with three ids: three turns."""
    body = {"token_ids": FIRST, "sampling_params": {"max_tokens": 4}, "return_token_ids": True}
    for name in ("one", "two", "three"):
        status, answer = await scene.ask(TOKENS, body, X_Request_Id=name)
        scene.check(status == 200, f"{status}: {answer}")
        scene.answered(answer)
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def an_sdk_that_retries(scene: Scene) -> float:
    """The ``openai`` client, whose first answer is lost: it asks again by itself."""
    import openai

    num_lost = 0

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """To the gateway and back, but for all that is said to the first connection."""
        nonlocal num_lost
        there, to_there = await asyncio.open_connection("127.0.0.1", scene.port)
        asking = asyncio.create_task(_copy(reader, to_there))
        try:
            if num_lost == 0:
                await there.read(2**16)
                num_lost += 1
            else:
                await _copy(there, writer)
        finally:
            asking.cancel()
            writer.close()
            to_there.close()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as between:
        port = between.sockets[0].getsockname()[1]
        url = scene.url.replace(f":{scene.port}", f":{port}")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=scene.key) as client:
            made = await client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "34"}],
                max_tokens=4,
                extra_body={"return_token_ids": True},
            )
    scene.answered(json.loads(made.model_dump_json()))
    scene.check(num_lost == 1, f"{num_lost} answers were lost")
    scene.happened()
    return await behave(scene)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)


@behaviour("request")
async def hangs_up_in_mid_stream(scene: Scene) -> float:
    """It asks for streams and is gone: at once, behind the headers, and in the middle of a turn."""
    body = {"messages": QUESTION, "stream": True, "max_tokens": MAX_TOKENS}
    data = json.dumps(body).encode()
    head = (
        f"POST {scene.url.partition(str(scene.port))[2]}{CHAT} HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {scene.key}\r\nContent-Length: {len(data)}\r\n\r\n"
    ).encode()
    for what, wait_s in ((head + data, 0.0), (head + data, 0.02), (head + data[:10], 0.0)):
        _, writer = await asyncio.open_connection("127.0.0.1", scene.port)
        writer.write(what)
        await writer.drain()
        await asyncio.sleep(wait_s)
        writer.transport.abort()
    scene.happened()
    return await behave(scene)


@behaviour("request")
async def two_agents_at_once(scene: Scene) -> float:
    """Two chats and two rows of token turns at the same time, the same beginning among them."""
    await asyncio.gather(talk(scene, "12"), talk(scene, "12"), _row(scene), _row(scene))
    scene.happened()
    return scene.reward


async def _row(scene: Scene) -> None:
    await first_turn(scene)
