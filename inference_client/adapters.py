"""Adapters at an endpoint: what it takes, how one is sent, loaded under a name, and unloaded.

For vLLM with the plugin (``easyrl_vllm.adapters``): its workers take an adapter's tensors from the
trainer's artifact, then its server is told a name for it, which requests give as their ``model``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import orjson

from easyrl.inference_client.answers import MAX_WORKERS, Word
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.lora_ranks import least_max_rank

PREFIX = "easyrl:"  # of a path that the plugin loads from memory
LIMITS = "easyrl_adapter_limits"  # methods of each worker
RECEIVE = "easyrl_receive_adapter"
MOST_MODULES = 1024  # names that an endpoint may list
MOST_NAMES = 65_536  # of adapters


class AdapterLimits(msgspec.Struct, frozen=True):
    """What adapters an endpoint takes."""

    max_rank: int
    # last parts of the names of layers that can have one
    modules: Annotated[list[Word], msgspec.Meta(max_length=MOST_MODULES)]
    problem: Word | None  # why it takes none

    def refusal(self, rank: int, target_modules: Sequence[str]) -> str | None:
        """Why it cannot serve an adapter of ``rank`` on ``target_modules``, with the remedy."""
        if self.problem is not None:
            return f"takes no adapters: it {self.problem}"
        if rank > self.max_rank:
            return (
                f"takes adapters up to rank {self.max_rank}, model.lora.rank is {rank}: start it "
                f"with --max-lora-rank {least_max_rank(rank)}, or lower model.lora.rank"
            )
        last = [target.rpartition(".")[2] for target in target_modules]
        if unknown := [target for target in last if target not in self.modules]:
            return (
                f"can have no adapter on {', '.join(unknown)}, only on {', '.join(self.modules)}: "
                "change model.lora.target_modules, or start it without --lora-target-modules"
            )
        return None


async def adapter_limits(client: EndpointClient) -> AdapterLimits:
    """Of all its workers together. Raises ``EndpointError``, also if it has no such method."""
    workers = (await client.call_workers(_LIMITS, LIMITS, {})).results
    problem = next((each.problem for each in workers if each.problem is not None), None)
    modules = dict.fromkeys(name for each in workers for name in each.modules)
    return AdapterLimits(min(each.max_rank for each in workers), list(modules), problem)


async def send_adapter(
    client: EndpointClient,
    name: str,
    rank: int,
    artifact: str,
    chunks: Sequence[Mapping[str, Any]],
    *,
    begins: bool,
) -> None:
    """Has its workers take ``chunks`` of ``artifact``; the first of an adapter ``begins`` it."""
    update = {"adapter": name, "rank": rank, "begins": begins, "artifact": artifact}
    text = orjson.dumps(update | {"chunks": list(chunks)}).decode()
    await client.call_workers(_TAKEN, RECEIVE, {"update": text})


async def load_adapter(client: EndpointClient, name: str) -> None:
    """From here on requests may name it: its tensors are in the layers of all workers."""
    await client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": PREFIX + name})


async def unload_adapter(client: EndpointClient, name: str) -> None:
    """From here on requests that name it are refused. Refused itself where it is not known."""
    await client.post("/v1/unload_lora_adapter", {"lora_name": name})


async def loaded_adapters(client: EndpointClient) -> list[str]:
    """Names that any trainer's plugin has loaded and nobody has unloaded; not those of folders."""
    cards = (await client.get(_CARDS, "/v1/models")).data
    return [card.id for card in cards if card.root == PREFIX + card.id]


class _Card(msgspec.Struct):
    id: Word
    root: Word | None = None  # of an adapter: the path that it was loaded from


class _Cards(msgspec.Struct):
    data: Annotated[list[_Card], msgspec.Meta(max_length=MOST_NAMES)]


class _Limits(msgspec.Struct):
    results: Annotated[list[AdapterLimits], msgspec.Meta(min_length=1, max_length=MAX_WORKERS)]


class _Taken(msgspec.Struct):
    results: list[object]  # of workers that have taken it


_CARDS = msgspec.json.Decoder(_Cards)
_LIMITS = msgspec.json.Decoder(_Limits)
_TAKEN = msgspec.json.Decoder(_Taken)
