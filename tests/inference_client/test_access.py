"""The guard of vLLM's routes (``easyrl_vllm.access``), as the ASGI application that it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from easyrl.inference_client.vllm_plugin.easyrl_vllm.access import RequireApiKey

KEY = "s3cret"
ROUTES = [
    *("/inference/v1/generate", "/v1/models", "/pause", "/resume", "/update_weights"),
    *("/collective_rpc", "/health/", "/health/../update_weights", "//health", "/", "/metrics/x"),
]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASYRL_API_KEY", KEY)


async def everything(scope: Any, receive: Any, send: Any) -> None:
    """Whoever gets here has passed."""
    await send({"type": "http.response.start", "status": 200, "headers": []})


def ask(path: str, *authorization: str, kind: str = "http", root_path: str = "") -> dict[str, Any]:
    """The first message of the answer."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the body of a request that may be refused is not read")

    headers = [(b"authorization", value.encode()) for value in authorization]
    scope = {"type": kind, "path": path, "root_path": root_path, "headers": headers}
    asyncio.run(RequireApiKey(everything)(scope, receive, send))
    return sent[0]


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_asks_for_the_key(path: str) -> None:
    for given in ([], ["Bearer wrong"], [KEY], ["Bearer "], [f"Bearer {KEY}x"], ["Bearer sécret"]):
        assert ask(path, *given)["status"] == 401
    assert ask(path, "Bearer wrong", f"Bearer {KEY}")["status"] == 401  # who reads which?
    assert ask(path, f"Bearer {KEY}")["status"] == 200


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_probes_need_none(path: str) -> None:
    assert ask(path)["status"] == ask(f"/below{path}", root_path="/below")["status"] == 200


def test_a_web_socket_is_refused_too() -> None:
    assert ask("/v1/realtime", kind="websocket")["type"] == "websocket.close"


@pytest.mark.parametrize("value", [None, ""])
def test_a_guard_without_a_key_is_an_error(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EASYRL_API_KEY")
    if value is not None:
        monkeypatch.setenv("EASYRL_API_KEY", value)
    with pytest.raises(ValueError, match="EASYRL_API_KEY: is not set"):
        RequireApiKey(everything)
