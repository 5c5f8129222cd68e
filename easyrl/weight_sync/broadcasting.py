"""Weights by broadcast between devices (``weight_sync.transport: nccl`` or ``hccl``), on rank 0.

vLLM's trainer engine has each rank iterate over the weights inside ``send_weights``. Here only rank
0 opens and sends, in a thread of its own that is fed by the pass over the weights which every rank
makes anyway: a broadcast that fails or hangs can be left behind, and no collective of the trainer
waits for it. The endpoints then get that version from the host's copy.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from easyrl.config import WeightSyncConfig
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.pool.endpoint_pool import Endpoint
from easyrl.inference_client.transfer.broadcast import (
    BACKENDS,
    Broadcast,
    EndpointsClient,
    WeightMeta,
)
from easyrl.runtime.machine import free_port
from easyrl.weight_sync.store import NamedWeights, local_address_towards

logger = logging.getLogger(__name__)

MOST_FAILURES = 3  # in a row; after that every version goes by artefact
WATCH_INTERVAL_S = 0.2  # between looks at what the pool says of an endpoint
CLOSING_S = 10.0  # for a group to be left at the end of the run

OpenGroup = Callable[[Sequence[str], Sequence[WeightMeta]], Broadcast]  # URLs, what will be sent


class BroadcastFailed(RuntimeError):
    """No endpoint can be relied on to have the weights."""


class TeeClosed(RuntimeError):
    """The pass over the weights goes on without the broadcast."""


class TensorTee:
    """Hands each tensor of the main thread's pass to a sender's thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offered: tuple[str, Tensor] | None = None
        self._ended = False
        self._closed = False

    def pass_on(self, named_weights: NamedWeights) -> NamedWeights:
        """``named_weights``, each also offered to the sender.

        Consumes: the engine's tensors. Waits for: the sender to have copied a tensor before the
        next one is asked for. Is unblocked by: the copy, or ``close``.
        """
        for item in named_weights:
            with self._changed:
                self._offered = item
                self._changed.notify_all()
            yield item  # is written to the host's copy while the sender makes its own
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._offered is None)
                self._offered = None
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def copies(self, device: torch.device) -> NamedWeights:
        """All tensors of the pass on ``device``, for the sender's thread.

        Copied on the stream that the sender works on: the allocator gives a tensor's memory to the
        next one of its stream. Raises ``TeeClosed``.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._ended or bool(self._offered))
                if self._offered is None or self._closed:
                    break
                name, weight = self._offered
                copy = weight.to(device, copy=True)
                self._offered = None
                self._changed.notify_all()
            yield name, copy
        if not self._ended:
            raise TeeClosed("the broadcast was given up")

    def close(self) -> None:
        """The pass waits for no sender any more. Safe to call twice, from any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Broadcaster:
    """Keeps one group open with the endpoints that are there, in their present starts.

    Args:
        open_group: called in a thread, as is the group.
        timeout_s: of opening and sending together.
    """

    def __init__(self, open_group: OpenGroup, timeout_s: float) -> None:
        self._open_group = open_group
        self._timeout_s = timeout_s
        self._device = _current_device()
        self._metadata: list[WeightMeta] = []  # of a whole pass
        self._lock = threading.Lock()
        self._group: Broadcast | None = None
        self._members: dict[str, int] = {}
        self._failures = 0

    def begin(self) -> TensorTee | None:
        """For a pass over the weights; None if it is not to be broadcast.

        The receivers have to know all names and shapes before the first tensor. A first pass goes
        by artefact, the probe's if there is one, and tells them.
        """
        return TensorTee() if self._metadata and self._failures < MOST_FAILURES else None

    def note(self, named_weights: NamedWeights) -> NamedWeights:
        """``named_weights``, whose names, dtypes and shapes are known when all have come."""
        metadata = []
        for name, weight in named_weights:
            metadata.append(WeightMeta(name, weight.dtype, tuple(weight.shape)))
            yield name, weight
        self._metadata = metadata

    async def send(
        self, endpoints: Sequence[Endpoint], starts: Mapping[str, int], version: str, tee: TensorTee
    ) -> None:
        """Brings what ``tee`` holds to ``endpoints``, which serve it under ``version``.

        Consumes: ``tee``. Waits for: the group, opened anew if ``starts`` (by URL) are not
        those of the last time, and the slowest endpoint. Is unblocked by: its end, ``timeout_s``,
        or the pool finding an endpoint down. Raises ``BroadcastFailed``; the group is closed then.
        """
        given_up = threading.Event()
        members = dict(starts)
        try:
            sent = _in_thread(lambda: self._open_and_send(members, version, tee, given_up))
            await self._until_done(sent, endpoints)
            self._failures = 0
        except BaseException as error:
            given_up.set()
            self.close(wait_s=0.0)  # of no use any more
            if isinstance(error, BroadcastFailed):
                self._failures += 1
                if self._failures == MOST_FAILURES:
                    logger.error("weight sync: no more broadcasts, %d have failed", MOST_FAILURES)
            raise

    def _open_and_send(
        self, members: dict[str, int], version: str, tee: TensorTee, given_up: threading.Event
    ) -> None:
        """In a thread that may be left behind."""
        if self._device.type != "cpu":  # which one is current is known by thread
            torch.accelerator.set_device_index(self._device.index)
        with self._lock:
            group = self._group
        if group is not None and members != self._members:
            group.close()
            group = None
        if group is None:
            group = self._open_group(list(members), self._metadata)
            with self._lock:
                if not given_up.is_set():
                    self._group, self._members = group, members
            if given_up.is_set():
                group.close()
                raise TeeClosed("the broadcast was given up before its group was open")
        group.send(version, tee.copies(self._device))

    async def _until_done(self, sent: asyncio.Future[None], endpoints: Sequence[Endpoint]) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not sent.done():
            for endpoint in endpoints:
                if endpoint.down is not None:
                    raise BroadcastFailed(f"{endpoint.url} went down in it: {endpoint.down}")
            if time.monotonic() >= deadline_s:
                raise BroadcastFailed(
                    f"it took longer than {self._timeout_s:g} s (weight_sync.timeout_s)"
                )
            await asyncio.wait([sent], timeout=WATCH_INTERVAL_S)
        if (error := sent.exception()) is not None:  # another package's code, whatever it raises
            raise BroadcastFailed(f"{type(error).__name__}: {error}") from error

    def close(self, wait_s: float = CLOSING_S) -> None:
        """Leaves the group in a thread, where it may hang; waits for that for a moment only."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            closing = threading.Thread(target=group.close, daemon=True)
            closing.start()
            closing.join(wait_s)


def device_broadcast(config: WeightSyncConfig, api_keys: ApiKeys) -> OpenGroup:
    """Opens groups of ``config.transport``, nccl or hccl.

    Raises ``ValueError`` if the package that does it is not installed.
    """
    transport = config.transport
    assert transport in BACKENDS
    package = BACKENDS[transport][0].partition(".")[0]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:  # without an origin it is only a folder of that name
        raise ValueError(
            f"weight_sync.transport: {config.transport} needs the package {package} in the "
            "trainer's environment, in the servers' version; install it, or use auto, which goes "
            "through shared memory, a shared disk or http"
        )

    def open_group(urls: Sequence[str], metadata: Sequence[WeightMeta]) -> Broadcast:
        client = EndpointsClient(urls, api_keys, config.timeout_s)
        try:
            return Broadcast(
                transport,
                metadata,
                client,
                master_address=config.advertise_host or address_towards_all(urls),
                master_port=free_port(),
                buffer_bytes=max(config.chunk_bytes, *(meta.num_bytes for meta in metadata)),
            )
        except BaseException:
            client.close()
            raise

    return open_group


def address_towards_all(urls: Sequence[str]) -> str:
    """The address of this machine that all servers at ``urls`` reach.

    Those on this machine also reach the address that others do. Raises ``EndpointUnavailable``.
    """
    addresses = [local_address_towards(url) for url in urls]
    return next((a for a in addresses if not a.startswith("127.") and a != "::1"), addresses[0])


def _current_device() -> torch.device:
    if (kind := torch.accelerator.current_accelerator(check_available=True)) is None:
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Runs ``work`` in a thread that holds up neither the loop nor the end of the process."""
    result: concurrent.futures.Future[None] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()  # cannot be cancelled from here on

    def run() -> None:
        try:
            work()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    threading.Thread(target=run, name="easyrl-broadcast", daemon=True).start()
    told = asyncio.wrap_future(result)
    told.add_done_callback(lambda done: done.cancelled() or done.exception())  # or it is logged
    return told
