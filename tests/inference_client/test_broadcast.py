"""Broadcast between devices: ranks and versions; the collective itself is faked."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.transfer.broadcast import Broadcast, EndpointsClient
from tests.vllm_environment import VLLM_PYTHON

CHECKOUT = Path(__file__).parents[2]


class FakeEndpoint(ThreadingHTTPServer):
    """Remembers what it was told; ``world_size`` workers."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.calls: list[tuple[str, Any]] = []
        self.refuses: str | None = None
        self.redirects_to: str | None = None
        self.padding = ""  # of each answer
        self.keys: set[str | None] = set()  # Authorization headers
        super().__init__(("127.0.0.1", 0), FakeRoutes)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class FakeRoutes(BaseHTTPRequestHandler):
    server: FakeEndpoint

    def do_GET(self) -> None:  # noqa: N802
        self.server.keys.add(self.headers["Authorization"])
        if self.server.redirects_to is not None:
            self.send_response(302)
            self.send_header("Location", self.server.redirects_to)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        answer = {"world_size": self.server.world_size, "padding": self.server.padding}
        self._answer(200, answer)

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.calls.append((self.path, body))
        if self.path == self.server.refuses:
            asked_with = self.headers["Authorization"]
            self._answer(400, {"error": "not today", "asked_with": asked_with})
        else:
            self._answer(200, {})

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoints() -> Iterator[list[FakeEndpoint]]:
    servers = [FakeEndpoint(2), FakeEndpoint(1), FakeEndpoint(4)]
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


def client_of(endpoints: list[FakeEndpoint]) -> EndpointsClient:
    return EndpointsClient([endpoint.url for endpoint in endpoints], None, 600.0)


def test_each_endpoint_has_its_own_ranks(endpoints: list[FakeEndpoint]) -> None:
    client = client_of(endpoints)
    assert client.num_workers == 7
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 8})
    assert [endpoint.calls for endpoint in endpoints] == [
        [("/init_weight_transfer_engine", {"init_info": {"rank_offset": first, "world_size": 8}})]
        for first in (1, 3, 4)
    ]
    client.close()


def test_endpoints_take_the_version(endpoints: list[FakeEndpoint]) -> None:
    client = client_of(endpoints)
    client.weight_version = "run:1:3"
    client.start_weight_update()
    client.update_weights({"names": ["a"]})
    client.finish_weight_update()
    for endpoint in endpoints:
        assert endpoint.calls == [
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": {"names": ["a"]}}),
            ("/finish_weight_update", {"weight_version": "run:1:3"}),
        ]
    client.close()


def test_a_refusal_names_the_endpoints(endpoints: list[FakeEndpoint]) -> None:
    client = client_of(endpoints)
    endpoints[1].refuses = endpoints[2].refuses = "/start_weight_update"
    with pytest.raises(RuntimeError, match="status 400: .*not today") as raised:
        client.start_weight_update()
    assert endpoints[0].url not in str(raised.value)
    assert all(endpoint.url in str(raised.value) for endpoint in endpoints[1:])
    assert all(endpoint.calls for endpoint in endpoints)  # the others were told nevertheless
    client.close()


def test_each_endpoint_is_sent_its_own_key(endpoints: list[FakeEndpoint]) -> None:
    urls = [endpoint.url for endpoint in endpoints]
    EndpointsClient(urls, ApiKeys({urls[0]: "its own"}, "of all others"), 600.0).close()
    first, *others = (endpoint.keys for endpoint in endpoints)
    assert first == {"Bearer its own"}
    assert others == [{"Bearer of all others"}, {"Bearer of all others"}]


def test_a_key_that_an_endpoint_repeats_comes_into_no_message(
    endpoints: list[FakeEndpoint],
) -> None:
    endpoint = endpoints[0]
    client = EndpointsClient([endpoint.url], ApiKeys({endpoint.url: "sk-MARKED"}), 600.0)
    endpoint.refuses = "/start_weight_update"
    with pytest.raises(RuntimeError, match=r"not today.*Bearer \[key\]") as raised:
        client.start_weight_update()
    assert "MARKED" not in str(raised.value)
    client.close()


def test_a_key_is_not_sent_on_to_where_an_endpoint_redirects(endpoints: list[FakeEndpoint]) -> None:
    first, second, _ = endpoints
    first.redirects_to = f"{second.url}/get_world_size"
    with pytest.raises(RuntimeError, match=f"{first.url}/get_world_size: status 302"):
        EndpointsClient([first.url], ApiKeys({first.url: "its own"}), 600.0)
    assert second.keys == set()


def test_what_an_endpoint_answers_is_bounded(endpoints: list[FakeEndpoint]) -> None:
    endpoints[1].padding = "a" * 5 * 2**20
    with pytest.raises(RuntimeError, match=f"{endpoints[1].url}/get_world_size: .* 4194304 bytes"):
        client_of(endpoints)


def test_an_endpoint_that_is_away_is_named() -> None:
    away = FakeEndpoint(1)
    away.shutdown()
    away.server_close()
    with pytest.raises(RuntimeError, match=away.url):
        client_of([away])


def test_without_the_packages_the_key_is_named(endpoints: list[FakeEndpoint]) -> None:
    client = client_of(endpoints)
    for transport, package in (("nccl", "vLLM"), ("hccl", "vllm-ascend")):
        with pytest.raises(ValueError, match=f"weight_sync.transport: .* needs .*{package}"):
            Broadcast(
                transport,
                [],
                client,
                master_address="127.0.0.1",
                master_port=1,
                buffer_bytes=1,
            )
    client.close()


WITH_VLLM = """
import json, sys
import torch
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightSource
from easyrl.inference_client.transfer.broadcast import *

sent, opened = {}, []
nccl_engine.open_trainer_endpoint = opened.append

class WithoutGpu(nccl_engine.NCCLTrainerWeightTransferEngine):
    def _broadcast(self, source, meta):
        assert isinstance(source, WeightSource)
        for name, tensor in self._checked_iter(source, meta):
            sent[name] = tensor.clone()

nccl_engine.NCCLTrainerWeightTransferEngine = WithoutGpu
weights = {"a": torch.randn(3, 2), "b": torch.randn(5).bfloat16()}
metadata = [WeightMeta(n, w.dtype, tuple(w.shape)) for n, w in weights.items()]
assert [meta.num_bytes for meta in metadata] == [24, 10]
client = EndpointsClient(sys.argv[1:], None, 600.0)
assert isinstance(client, VLLMWeightSyncClient)
broadcast = Broadcast("nccl", metadata, client, master_address="127.0.0.1", master_port=7,
                      buffer_bytes=1 << 20)
for version in ("v1", "v2"):
    sent.clear()
    broadcast.send(version, iter(weights.items()))
    assert sent.keys() == weights.keys()
    assert all(torch.equal(sent[name], weights[name]) for name in weights)
assert opened[0].world_size == 8 and opened[0].packed
broadcast.close()
print("fine")
"""


@pytest.mark.vllm
def test_vllms_own_trainer_engine_drives_it(endpoints: list[FakeEndpoint]) -> None:
    """Everything of vLLM's engine but the group and the broadcast, which need GPUs."""
    ended = subprocess.run(
        [VLLM_PYTHON, "-c", WITH_VLLM, *(endpoint.url for endpoint in endpoints)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0 and ended.stdout.endswith("fine\n"), ended.stderr
    update = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[3, 2], [5]]}
    for endpoint, first_rank in zip(endpoints, (1, 3, 4), strict=True):
        (route, body), *rounds = endpoint.calls
        assert route == "/init_weight_transfer_engine"
        told = body["init_info"]
        assert told["rank_offset"] == first_rank
        assert (told["world_size"], told["master_port"], told["packed"]) == (8, 7, True)
        assert told["packed_buffer_size_bytes"] == 1 << 20
        assert rounds == [
            call
            for version in ("v1", "v2")
            for call in (
                ("/start_weight_update", {}),
                ("/update_weights", {"update_info": update}),
                ("/finish_weight_update", {"weight_version": version}),
            )
        ]
