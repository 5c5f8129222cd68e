"""Bytes that live tensors hold."""

from __future__ import annotations

import gc

import torch
from torch import nn

# By address. They are kept alive: an address that is given out again would hide what is new there.
Storages = dict[int, torch.UntypedStorage]


def held_storages(model: nn.Module | None = None) -> Storages:
    """The storages of all tensors that Python can reach, and of ``model``'s gradients."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
    if model is not None:  # which live on the C++ side
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
    storages = [t.untyped_storage() for t in tensors if t.device.type != "meta"]
    return {storage.data_ptr(): storage for storage in storages}


def held_bytes(model: nn.Module, before: Storages) -> int:
    """What is held beyond ``before``."""
    now = held_storages(model)
    return sum(storage.nbytes() for address, storage in now.items() if address not in before)
