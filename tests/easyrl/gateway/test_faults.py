"""Clients that retry, hang up, flood, lie about who they are or ask for what training decides."""

import asyncio
import json
import socket

import orjson
import pytest

from easyrl.config import SamplingConfig
from easyrl.gateway.messages import Open, Refused
from tests.easyrl.gateway.gateway_parts import (
    ADD,
    END,
    KEY,
    SESSION,
    answer_of,
    close,
    served,
    until,
    user,
)

QUESTION = user("what is it?")
BODY = {"messages": [QUESTION]}
GENERATE = "/inference/v1/generate"


# -- idempotency, clients that leave ----------------------------------------------------------


@pytest.mark.parametrize("header", ["X_Request_Id", "Idempotency_Key"])
async def test_a_retry_with_the_same_id_is_the_same_record(tmp_path, header):
    async with served(tmp_path) as gateway:
        first, second, other = [
            await gateway.post(BODY, **{header: name}) for name in ("one", "one", "two")
        ]
        assert first == second and first != other
        assert len(gateway.trainer.asked) == 2


async def test_a_retry_while_the_first_still_runs_waits_for_the_same_record(tmp_path):
    async with served(tmp_path) as gateway:
        gateway.trainer.may_answer.clear()
        both = [asyncio.create_task(gateway.post(BODY, X_Request_Id="one")) for _ in range(2)]
        await until(lambda: gateway.trainer.asked)
        await asyncio.sleep(0.1)
        gateway.trainer.may_answer.set()
        first, second = await asyncio.gather(*both)
        assert first == second and len(gateway.trainer.asked) == 1


async def test_a_retry_without_an_id_is_another_turn(tmp_path):
    async with served(tmp_path) as gateway:
        (_, first), (_, second) = [await gateway.post(BODY) for _ in range(2)]
        assert first["id"] != second["id"] and len(gateway.trainer.asked) == 2


async def test_an_id_of_another_request_is_refused(tmp_path):
    async with served(tmp_path) as gateway:
        await gateway.post(BODY, X_Request_Id="one")
        status, said = await gateway.post({"messages": [user("other")]}, X_Request_Id="one")
        assert status == 422 and "another request" in said["error"]["message"]
        assert len(gateway.trainer.asked) == 1


async def test_a_failure_is_not_kept_for_its_id(tmp_path):
    async with served(tmp_path) as gateway:
        gateway.trainer.says = [Refused(0, 503, "not now"), "yes"]
        assert (await gateway.post(BODY, X_Request_Id="one"))[0] == 503
        assert (await gateway.post(BODY, X_Request_Id="one"))[0] == 200


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_hangs_up_finds_its_answer_by_its_id(tmp_path, streams):
    async with served(tmp_path, keep_alive_s=0.05) as gateway:
        gateway.trainer.may_answer.clear()
        body = {**BODY, "stream": streams}
        request = asyncio.create_task(gateway.post(body, X_Request_Id="one"))
        await until(lambda: gateway.trainer.asked)
        await asyncio.sleep(0.2)
        request.cancel()
        await asyncio.sleep(0.2)
        gateway.trainer.may_answer.set()
        await until(lambda: gateway.trainer.answered)
        headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "one"}
        url = gateway.url + "/v1/chat/completions"
        async with gateway.http.post(url, data=json.dumps(body), headers=headers) as response:
            text = await response.text()
        assert "answer 1" in text and len(gateway.trainer.asked) == 1
        answer = {"role": "assistant", "content": "answer 1"}
        await gateway.chat(QUESTION, answer, user("next"))  # it is in the history as well
        begun = gateway.trainer.prompt(0) + gateway.trainer.answered[0]
        assert gateway.trainer.prompt(1)[: len(begun)] == begun


async def test_a_stream_is_kept_alive_until_its_record_and_ends_with_done(tmp_path):
    async with served(tmp_path, keep_alive_s=0.05) as gateway:
        gateway.trainer.may_answer.clear()
        headers = {"Authorization": f"Bearer {KEY}"}
        url = gateway.url + "/v1/chat/completions"
        data = json.dumps({**BODY, "stream": True})
        async with gateway.http.post(url, data=data, headers=headers) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream"
            assert await response.content.readline() == b": keep-alive\n"
            gateway.trainer.may_answer.set()
            rest = (await response.read()).decode()
        events = [line for line in rest.split("\n\n") if line.strip() and line[0] != ":"]
        assert events[-1] == "data: [DONE]"
        assert [orjson.loads(e[6:])["object"] for e in events[:-1]] == ["chat.completion.chunk"] * (
            len(events) - 1
        )


async def test_what_fails_behind_a_keep_alive_is_an_event(tmp_path):
    async with served(tmp_path, keep_alive_s=0.05) as gateway:
        gateway.trainer.may_answer.clear()
        gateway.trainer.says = [Refused(0, 503, "not now")]
        headers = {"Authorization": f"Bearer {KEY}"}
        url = gateway.url + "/v1/chat/completions"
        data = json.dumps({**BODY, "stream": True})
        async with gateway.http.post(url, data=data, headers=headers) as response:
            await response.content.readline()
            gateway.trainer.may_answer.set()
            rest = (await response.read()).decode()
        (said,) = [e.strip() for e in rest.split("\n\n") if "data: {" in e]
        assert orjson.loads(said[6:])["error"]["message"] == "not now"


async def test_nothing_is_answered_before_the_trainers_answer(tmp_path):
    async with served(tmp_path) as gateway:
        gateway.trainer.may_answer.clear()
        request = asyncio.create_task(gateway.post(BODY))
        await until(lambda: gateway.trainer.asked)
        done, _ = await asyncio.wait([request], timeout=0.3)
        assert not done
        number = gateway.trainer.asked[0].number
        gateway.trainer.send(answer_of(number + 100, [1]))  # of nothing that was asked
        gateway.trainer.send(answer_of(number, gateway.trainer.ids("now" + END)))
        assert (await request)[1]["choices"][0]["message"]["content"] == "now"
        gateway.trainer.may_answer.set()  # a second answer to it


# -- who may ask -------------------------------------------------------------------------------


async def test_wrong_keys_unknown_and_closed_sessions(tmp_path):
    async with served(tmp_path) as gateway:
        for key in ("", "Bearer wrong", f"Basic {KEY}", KEY, f"bearer {KEY}x"):
            status, said = await gateway.post(BODY, Authorization=key)
            assert status == 401 and said["error"]["code"] == "invalid_api_key"
        own, gateway.url = gateway.url, gateway.root + "/sessions/nobody"
        status, said = await gateway.post(BODY)
        assert status == 404 and said["error"]["type"] == "not_found_error"
        gateway.url = own
        assert (await gateway.post(BODY))[0] == 200
        gateway.trainer.may_answer.clear()
        waiting = asyncio.create_task(gateway.post(BODY))
        await until(lambda: len(gateway.trainer.asked) == 2)
        gateway.trainer.send(close())
        status, said = await waiting  # it ends with its session
        assert status == 410 and said["error"]["code"] == "session_closed"
        assert (await gateway.post(BODY))[0] == 410
        assert (await gateway.post(BODY, Authorization="Bearer wrong"))[0] == 401
        assert len(gateway.trainer.asked) == 2
        gateway.trainer.may_answer.set()  # answered after its session's end


async def test_the_runs_key_opens_every_session(tmp_path):
    async with served(tmp_path, run_key="of the run") as gateway:
        assert (await gateway.post(BODY, Authorization="Bearer of the run"))[0] == 200


async def test_a_session_without_requests_for_too_long_is_given_up(tmp_path):
    async with served(tmp_path, idle_timeout_s=0.2) as gateway:
        assert (await gateway.post(BODY))[0] == 200
        await asyncio.sleep(1.6)
        assert (await gateway.post(BODY))[0] == 410


async def test_sessions_beyond_their_number_are_refused(tmp_path):
    async with served(tmp_path, max_sessions=1) as gateway:
        told = SamplingConfig().model_dump_json().encode()
        gateway.trainer.send(Open("s2", KEY, told))
        await asyncio.sleep(0.1)
        gateway.url = gateway.root + "/sessions/s2"
        status, said = await gateway.post(BODY)
        assert status == 503 and "1 sessions are open" in said["error"]["message"]


# -- floods and broken bodies ------------------------------------------------------------------


async def test_a_flood_is_refused_and_those_within_the_bound_are_answered(tmp_path):
    async with served(tmp_path, max_requests=4) as gateway:
        gateway.trainer.may_answer.clear()
        flood = [asyncio.create_task(gateway.post(BODY)) for _ in range(40)]
        await until(lambda: len(gateway.trainer.asked) == 4)
        await asyncio.sleep(0.3)
        gateway.trainer.may_answer.set()
        statuses = [status for status, _ in await asyncio.gather(*flood)]
        assert sorted(statuses) == [200] * 4 + [429] * 36
        assert (await gateway.post(BODY))[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_refused(tmp_path, chunked):
    async def parts():
        for _ in range(64):
            yield b" " * 1024

    async with served(tmp_path, max_body_bytes=4096) as gateway:
        data = parts() if chunked else b" " * 65536
        headers = {"Authorization": f"Bearer {KEY}"}
        url = gateway.url + "/v1/chat/completions"
        async with gateway.http.post(url, data=data, headers=headers) as response:
            assert response.status == 413
            assert "4096 bytes" in (await response.json())["error"]["message"]
        assert (await gateway.post(BODY))[0] == 200 and len(gateway.trainer.asked) == 1


async def test_a_body_that_does_not_come_is_given_up(tmp_path):
    async with served(tmp_path, body_timeout_s=0.3) as gateway:
        port = int(gateway.root.rpartition(":")[2])
        head = (
            f"POST /sessions/{SESSION}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n{{"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode())
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()


@pytest.mark.parametrize(
    "body, says",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no JSON object"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
        (b'{"messages": [{"role": "user", "x": ' + b"[" * 900 + b"]" * 900 + b"}]}", "refuses"),
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "hello"}]}, "role"),
        ({"messages": [{"role": "user", "content": 3}]}, "int"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({**BODY, "max_tokens": 0}, "max_tokens"),
        ({**BODY, "stop": [""]}, "stop"),
        ({**BODY, "stop": ["x"] * 65}, "stop"),
        ({**BODY, "stop": 3}, "stop"),
        ({**BODY, "tools": [{"type": "function"}]}, "tools"),
        ({**BODY, "stream_options": {"include_usage": True}}, "stream"),
        ({**BODY, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
async def test_a_bad_body_is_refused_by_name(tmp_path, body, says):
    async with served(tmp_path) as gateway:
        status, said = await gateway.post(body)
        assert status == 400 and says in said["error"]["message"]
        assert said["error"]["type"] == "invalid_request_error"
        assert not gateway.trainer.asked


async def test_what_a_template_refuses_is_a_bad_request(tmp_path):
    refusing = "{{ raise_exception('only cats') }}"
    async with served(tmp_path, refusing) as gateway:
        status, said = await gateway.post(BODY)
        assert status == 400 and "only cats" in said["error"]["message"]
        assert "refuses" in gateway.trainer.ready.result().template_problem


async def test_without_a_template_only_token_ids_are_answered(tmp_path):
    async with served(tmp_path, None) as gateway:
        assert gateway.trainer.ready.result().template_problem == "there is none"
        status, said = await gateway.post(BODY)
        assert status == 400 and "no chat template" in said["error"]["message"]
        assert (await gateway.post({"token_ids": [1, 2]}, GENERATE))[0] == 200


async def test_noise_instead_of_http_leaves_the_others_alone(tmp_path):
    async with served(tmp_path) as gateway:
        port = int(gateway.root.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"\x00\xff" * 5000)
            assert (await gateway.post(BODY))[0] == 200


# -- what training decides ---------------------------------------------------------------------


TRAINED = SamplingConfig(temperature=0.7, top_k=5, stop=["END"])


@pytest.mark.parametrize(
    "key, value, own",
    [
        ("temperature", 1.0, "0.7"),
        ("temperature", "0.7", "0.7"),
        ("temperature", True, "0.7"),
        ("top_p", 0.9, "1.0"),
        ("top_k", 0, "5"),
        ("min_p", 0.1, "0.0"),
        ("presence_penalty", 0.5, "0.0"),
        ("frequency_penalty", 0.5, "0.0"),
        ("repetition_penalty", 1.1, "1.0"),
        ("min_tokens", 3, "0"),
        ("ignore_eos", True, "False"),
        ("seed", 1, "leave it out"),
        ("n", 2, "1"),
        ("logit_bias", {"1": 5}, "leave it out"),
        ("response_format", {"type": "json_object"}, "leave it out"),
        ("structured_outputs", {"json": {}}, "leave it out"),
        ("guided_regex", "a*", "leave it out"),
    ],
)
@pytest.mark.parametrize("route", ["chat", "generate"])
async def test_sampling_that_training_decides_is_refused_with_its_value(
    tmp_path, route, key, value, own
):
    async with served(tmp_path, sampling=TRAINED) as gateway:
        if route == "chat":
            status, said = await gateway.post({**BODY, key: value})
        else:
            body = {"token_ids": [1], "sampling_params": {key: value}}
            status, said = await gateway.post(body, GENERATE)
        assert status == 400 and not gateway.trainer.asked
        assert key in said["error"]["message"] and own in said["error"]["message"]
        assert said["error"]["param"].endswith(key)


@pytest.mark.parametrize(
    "more, says",
    [
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [ADD]}, "tool_choice"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_what_no_record_could_answer_is_refused(tmp_path, more, says):
    async with served(tmp_path) as gateway:
        status, said = await gateway.post({**BODY, **more})
        assert status == 400 and says in said["error"]["message"]


async def test_trainings_own_values_and_shorter_limits_are_fine(tmp_path):
    async with served(tmp_path, sampling=TRAINED) as gateway:
        same = {"temperature": 0.7, "top_p": 1, "top_k": 5, "n": 1, "seed": None, "logit_bias": {}}
        harmless = {"response_format": {"type": "text"}, "user": "me", "store": False}
        shorter = {"max_completion_tokens": 9, "max_tokens": 11, "stop": "x"}
        gateway.trainer.says = [gateway.trainer.ids("aENDb")]
        answer = await gateway.chat(QUESTION, **same, **harmless, **shorter, stop_token_ids=[3])
        (asked,) = gateway.trainer.asked
        assert (asked.max_tokens, asked.stop, asked.stop_token_ids) == (9, ("x",), (3,))
        assert answer["content"] == "a"  # up to training's own stop string


# -- the token route ---------------------------------------------------------------------------


async def test_token_ids_in_and_out_as_vllm_has_them(tmp_path):
    from easyrl.inference_client.responses import parse_generate_response

    async with served(tmp_path) as gateway:
        gateway.trainer.says = ["yes"]
        params = {"max_tokens": 5, "logprobs": 0, "temperature": 1.0, "stop_token_ids": [7]}
        body = {"token_ids": [1, 2, 3], "sampling_params": params, "return_token_ids": True}
        status, said = await gateway.post(body, GENERATE)
        assert status == 200 and said["prompt_token_ids"] == [1, 2, 3]
        (made,) = parse_generate_response(orjson.dumps(said), "http://x", 3, n=1)
        assert made.token_ids.tolist() == gateway.trainer.answered[0]
        assert made.version_spans[0].version == "run:1:0" and made.finish_reason == "stop"
        (asked,) = gateway.trainer.asked
        assert gateway.trainer.prompt(0) == [1, 2, 3] and asked.max_tokens == 5
        assert asked.stop_token_ids == (7,)
        gateway.trainer.says = ["yes"]
        _, said = await gateway.post({**body, "output_mode": "text"}, GENERATE)
        assert said["choices"][0]["text"] == "yes"


@pytest.mark.parametrize(
    "body, says",
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [2**31]}, "token_ids"),
        ({"token_ids": [1.5]}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": [1], "stream": True}, "stream"),
        ({"token_ids": [1], "sampling_params": 3}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 5}}, "logprobs"),
        ({"token_ids": [1], "features": {"a": 1}}, "features"),
    ],
)
async def test_bad_token_requests_are_refused_by_name(tmp_path, body, says):
    async with served(tmp_path) as gateway:
        status, said = await gateway.post(body, GENERATE)
        assert status == 400 and says in said["error"]["message"]
        assert not gateway.trainer.asked
