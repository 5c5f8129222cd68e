"""An endpoint whose every answer the test scripts, for the order of events of a reconciliation."""

import asyncio
from collections.abc import Awaitable, Callable

import torch

from easyrl.inference_client.client import WorkerProof
from easyrl.inference_client.transfer.artifact import Chunk
from easyrl.weight_sync.target import Target
from tests.inference_client.served_tensors import ArtifactInMemory, entries, whole

URL = "http://endpoint"
WEIGHTS = {f"weight-{number}": torch.full((1,), 1.0 + number) for number in range(40)}
VERSION, UPDATING = "run:0:1", "run:0:1:updating"
PUSH = ["init", "pause", "stamp", "start", "update", "finish"]


class ScriptedClient:
    """``EndpointClient`` without a server: notes what is called; ``script`` may step in."""

    url = URL

    def __init__(self, script: dict[str, Callable[[], Awaitable[None]]] | None = None) -> None:
        self.script = script or {}
        self.calls: list[str] = []
        self.chunks: list[list[str]] = []  # files of each update
        self.proofs_follow: list[bool] = []  # of each update
        self.stamps: list[tuple[str, str]] = []  # each call, and the stamp on tokens at that time
        self.version = "default"
        self.paused = False
        self.resets = True
        self.nonces: list[bytes] = []  # that it was asked with
        self.served = WEIGHTS

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        self.stamps.append((name, self.version))
        if name in self.script:
            await self.script[name]()

    async def weight_version(self, timeout_s=None) -> str:
        return self.version

    async def init_weight_transfer(self, init_info) -> None:
        assert init_info == {"to": URL}
        await self._called("init")

    async def pause(self, mode) -> None:
        assert mode == "wait"
        await self._called("pause")
        self.paused = True

    async def start_weight_update(self) -> None:
        await self._called("start")

    async def update_weights(self, update_info) -> None:
        assert update_info["artifact"] == "run-0-1"
        self.chunks.append([chunk["file"] for chunk in update_info["chunks"]])
        promises = {chunk.get("proof_follows", False) for chunk in update_info["chunks"]}
        self.proofs_follow.append(promises == {True})
        await self._called("update")

    async def abandon_weight_update(self) -> None:
        await self._called("abandon")

    async def finish_weight_update(self, version) -> None:
        await self._called("finish")
        self.version = version

    async def set_weight_version(self, version, timeout_s=None) -> None:
        await self._called("stamp")
        self.version = version

    async def prove_weights(self, nonce, tensors) -> list[WorkerProof]:
        self.nonces.append(nonce)
        await self._called("prove" if tensors else "ask")
        return [whole({name: self.served[name] for name in tensors}, nonce)]

    async def accept_proof(self, nonce) -> None:
        assert nonce == self.nonces[-1]
        await self._called("accept")

    async def reset_prefix_cache(self) -> bool:
        await self._called("reset")
        return self.resets

    async def resume(self) -> None:
        await self._called("resume")
        self.paused = False


class Announcer:
    async def init_info(self, url):
        return {"to": url}


def failing(*errors):
    """Raises each of ``errors`` once, then does nothing."""
    left = list(errors)

    async def step() -> None:
        if left:
            raise left.pop(0)

    return step


def chunk(number: int) -> Chunk:
    held = {f"weight-{number}": WEIGHTS[f"weight-{number}"]}
    return Chunk(f"chunk-{number}", 4, dict.fromkeys(held, "00"), entries(held))


def stream(num_chunks: int, *, complete: bool = True) -> Target:
    weights = Target("run:0:1")
    for number in range(num_chunks):
        weights.add(chunk(number))
    if complete:
        weights.complete(ArtifactInMemory(WEIGHTS))
    return weights


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)
