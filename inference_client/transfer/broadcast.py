"""Weights by broadcast between devices: our side of vLLM's trainer engines (``nccl``, ``hccl``).

vLLM's own trainer-side engine opens the group, packs and sends. What this adds: several endpoints
in one group, and versions. Other ranks of the trainer have no part in it.

Tested against vLLM 0.32's classes without a GPU; the broadcast itself has not been run. HCCL is
untested, written against vllm-ascend's class since its pull request 16960; releases before it have
static functions instead and are refused.
"""

from __future__ import annotations

import http.client
import importlib
import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from easyrl.inference_client.api_keys import ApiKeys, KeyErasure

ANSWER_BYTES = 4 * 2**20  # as of other routes
ERROR_BYTES = 8 * 2**10
QUOTED_CHARACTERS = 500

# by transport: module of the trainer-side engine, how its classes' names begin, what has it
BACKENDS = {
    "nccl": ("vllm.distributed.weight_transfer.nccl_engine", "NCCL", "vLLM 0.29 or newer"),
    "hccl": (
        "vllm_ascend.distributed.weight_transfer.hccl_engine",
        "HCCL",
        "a vllm-ascend with HCCLTrainerWeightTransferEngine",
    ),
}


@dataclass(frozen=True, slots=True)
class WeightMeta:
    """What a receiver has to know before a tensor comes (vLLM's ``ParamMeta``)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class EndpointsClient:
    """All endpoints at once, as vLLM's ``VLLMWeightSyncClient``: each has its ranks in one group.

    Raises ``RuntimeError`` naming the endpoints that failed.

    Args:
        urls: of the servers.
        api_keys: their bearer tokens.
        timeout_s: of one call, a whole broadcast included.
    """

    def __init__(self, urls: Sequence[str], api_keys: ApiKeys | None, timeout_s: float) -> None:
        self.weight_version: str | None = None  # taken by the endpoints at the end of an update
        self._urls = urls
        self._api_keys = api_keys or ApiKeys()
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
        self._threads = ThreadPoolExecutor(len(urls), "easyrl-broadcast")
        answers = self._on_all(lambda url, _: self._call(url, "GET", "/get_world_size", None))
        sizes = [int(json.loads(answer)["world_size"]) for answer in answers]  # workers, all ranks
        self._first_ranks = [sum(sizes[:index]) for index in range(len(sizes))]
        self.num_workers = sum(sizes)

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """``rank_offset`` in ``init_info`` is the first endpoint's first rank."""

        def body(index: int) -> dict[str, Any]:
            offset = init_info["rank_offset"] + self._first_ranks[index]
            return {"init_info": {**init_info, "rank_offset": offset}}

        self._post("/init_weight_transfer_engine", body)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", lambda _: {})

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self._post("/update_weights", lambda _: {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = weight_version or self.weight_version
        self._post("/finish_weight_update", lambda _: {"weight_version": version})

    def close(self) -> None:
        """Does not wait for a call that hangs in a broadcast."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _post(self, route: str, body: Callable[[int], Mapping[str, Any]]) -> None:
        self._on_all(lambda url, i: self._call(url, "POST", route, json.dumps(body(i)).encode()))

    def _on_all(self, call: Callable[[str, int], bytes]) -> list[bytes]:
        futures = [self._threads.submit(call, url, index) for index, url in enumerate(self._urls)]
        problems = [str(error) for future in futures if (error := future.exception())]
        if problems:
            raise RuntimeError("; ".join(problems))
        return [future.result() for future in futures]

    def _call(self, url: str, method: str, route: str, body: bytes | None) -> bytes:
        headers = {"Content-Type": "application/json"}
        api_key = self._api_keys.of(url)
        clean = KeyErasure(api_key)
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        request = urllib.request.Request(url + route, body, headers, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                answer = response.read(ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            text = clean.of_bytes(error.read(ERROR_BYTES)).decode(errors="replace")
            quoted = text[:QUOTED_CHARACTERS]
            raise RuntimeError(f"{url}{route}: status {error.code}: {quoted}") from None
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"{url}{route}: {clean.of(str(error))}") from None
        if len(answer) > ANSWER_BYTES:
            raise RuntimeError(f"{url}{route}: answers more than {ANSWER_BYTES} bytes")
        return answer


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key is not sent on to whom an endpoint names."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Broadcast:
    """One NCCL or HCCL group of the trainer's rank 0 and all workers; to vLLM its ``WeightSource``.

    Opened on rank 0; the calling thread's current device is the sender's.

    Args:
        metadata: of all tensors in the order in which they will come.
        client: of all endpoints, which were started with backend ``easyrl_nccl`` (or ``_hccl``);
            belongs to the group from here on.
        master_address, master_port: of rank 0, as the endpoints reach it; a free port.
        buffer_bytes: of each of the two packed buffers on the sender's and receivers' devices.

    Raises ``ValueError`` if the package is not installed here or is too old, ``RuntimeError`` if an
    endpoint refuses.
    """

    def __init__(
        self,
        transport: str,
        metadata: Sequence[WeightMeta],
        client: EndpointsClient,
        *,
        master_address: str,
        master_port: int,
        buffer_bytes: int,
    ) -> None:
        module, prefix, needed = BACKENDS[transport]
        try:
            from vllm.distributed.weight_transfer.base import WeightSource

            backend = importlib.import_module(module)
            engine_class = getattr(backend, f"{prefix}TrainerWeightTransferEngine")
            init_info_class = getattr(backend, f"{prefix}TrainerInitInfo")
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"weight_sync.transport: {transport} needs {needed} in the trainer's environment "
                f"({error}); install it, or use transport auto"
            ) from None
        WeightSource.register(Broadcast)
        init_info = init_info_class(
            rank=0,
            master_address=master_address,
            master_port=master_port,
            world_size=1 + client.num_workers,
            packed_buffer_size_bytes=buffer_bytes,
            **({"packed": True} if transport == "hccl" else {}),
        )
        self._metadata = list(metadata)
        self._tensors: Iterable[tuple[str, Tensor]] = ()  # of the next pass
        self._client = client
        self._engine = engine_class.trainer_init(init_info, client=client, source=self)

    def metadata(self) -> list[WeightMeta]:
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors)

    def send(self, version: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Brings ``tensors``, on the sender's device, to all endpoints, which serve ``version``.

        Raises ``RuntimeError`` naming the endpoints that failed, and whatever ``tensors`` raises;
        the group is then of no use.
        """
        self._tensors = tensors
        self._client.weight_version = version
        self._engine.send_weights()

    def close(self) -> None:
        """Leaves the group; a ``send`` that hangs in another thread is aborted."""
        self._engine.shutdown()
        self._client.close()
