"""A module's weights on their way from a device to page-locked host memory.

A copy into pageable memory goes through a small buffer of the driver's and has the host wait. Into
page-locked memory the device writes by itself, and the next module's weights travel while the host
hashes and writes this one's. The memory comes from torch's allocator of page-locked memory, which
keeps what is given back: two modules' worth, the embedding's among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor


class HostCopy:
    """``tensors`` as copies on the CPU, with the same bytes; ``ready`` waits for them.

    They may be freed or overwritten by work that is launched later. On a CPU the copy is made at
    once, or none is if they are ``kept`` unchanged until the copy's user is done: fresh memory
    costs more than what the user does with it. Tensors without data (device ``meta``) stay as they
    are.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, kept: bool = False) -> None:
        devices = {t.device for t in tensors.values() if t.device.type not in ("cpu", "meta")}
        self.runs_behind = bool(devices)
        if not devices:
            self._copies = {
                name: tensor.detach().to(tensor.device, copy=not (kept or tensor.is_meta))
                for name, tensor in tensors.items()
            }
            return
        (device,) = devices
        module = torch.get_device_module(device)
        current, beside = module.current_stream(device), _stream_beside(device)
        beside.wait_stream(current)  # which may be writing the weights
        self._copies = {}
        with module.stream(beside):
            for name, tensor in tensors.items():
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor.detach(), non_blocking=True)
                tensor.record_stream(beside)  # gathered weights are freed right away
                self._copies[name] = host
        self._done = module.Event()
        self._done.record(beside)
        # What changes the weights next comes after their copy.
        current.wait_stream(beside)

    def ready(self) -> dict[str, Tensor]:
        if self.runs_behind:
            self._done.synchronize()
        return self._copies


def one_ahead(copies: Iterable[HostCopy]) -> Iterator[dict[str, Tensor]]:
    """Each copy's tensors, the next one being under way where copies run behind the host."""
    source = iter(copies)
    under_way = next(source, None)
    while under_way is not None:
        current, under_way = under_way, None
        if current.runs_behind:
            under_way = next(source, None)
        yield current.ready()
        del current  # before the next is asked for: its memory is the one after's
        if under_way is None:
            under_way = next(source, None)


_streams: dict[torch.device, torch.Stream] = {}


def _stream_beside(device: torch.device) -> torch.Stream:
    """One for all copies of a device: they share its one way to the host."""
    if device not in _streams:
        _streams[device] = torch.get_device_module(device).Stream(device)
    return _streams[device]
