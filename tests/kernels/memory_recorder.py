"""How much memory operations hold at a time, on any device, by what they return."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


class PeakMemory(TorchDispatchMode):
    """``peak``: most elements of storages alive at a time, besides those of ``held``.

    ``alive``: those that are alive still. What an operation allocates and frees inside itself is
    not seen.
    """

    def __init__(self, *held: Tensor) -> None:
        super().__init__()
        self._held = {tensor.untyped_storage()._cdata for tensor in held}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in self._held:
                storage = value.untyped_storage()
                numel = storage.nbytes() // value.element_size()
                self._alive[storage._cdata] = (StorageWeakRef(storage), numel)
        self.peak = max(self.peak, self.alive)
        return result

    @property
    def alive(self) -> int:
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        return sum(numel for _, numel in self._alive.values())
