"""The weights that the embedded engine serves: names, versions, updates in place, checksums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn

from easyrl.inference_client.weight_transfer.artifact import read_chunk, tensor_checksum

INITIAL_VERSION = "default"  # vLLM's name for the weights a server started with


class ServedWeights:
    """A model's parameters under the names that ``save_pretrained`` gives them.

    An update is ``start``, any number of ``update``, ``finish``. If anything in it fails the
    weights are ``broken`` (they may be a mixture) until an update has completed; the version stays.
    """

    def __init__(self, model: nn.Module) -> None:
        self.version = INITIAL_VERSION
        self.broken: str | None = None  # why the weights cannot be used
        self._tensors = dict(_saved_views(model))
        self._missing: set[str] | None = None  # of the update that is open

    @property
    def update_is_open(self) -> bool:
        return self._missing is not None

    def start(self) -> None:
        """Opens an update; one that was open is forgotten."""
        self._missing = set(self._tensors)

    def update(self, path: Path, checksums: Mapping[str, str]) -> None:
        """Copies one chunk of an artifact into the parameters.

        Raises ``ValueError``, naming the tensor, on an unknown name, a wrong shape or dtype, a
        wrong hash, or if no update is open.
        """
        missing = self._opened()
        try:
            for name, weight in read_chunk(path, checksums):
                self._target(name, weight, path).copy_(weight)
                missing.discard(name)
        except ValueError as error:
            self._fail(error)
            raise

    def finish(self, version: str | None) -> None:
        """Closes the update, takes ``version``. Raises ``ValueError`` if a tensor did not come."""
        missing = sorted(self._opened())
        if missing:
            error = ValueError(
                f"weight update is incomplete: {missing[0]!r} did not arrive "
                f"({len(missing)} of {len(self._tensors)} tensors missing)"
            )
            self._fail(error)
            raise error
        self._missing = None
        self.broken = None
        if version is not None:
            self.version = version

    def checksums(self) -> dict[str, str]:
        """xxh3_64 of each tensor as it is served, by its saved name."""
        return {name: tensor_checksum(tensor) for name, tensor in self._tensors.items()}

    def _opened(self) -> set[str]:
        if self._missing is None:
            raise ValueError("no weight update is open; call /start_weight_update first")
        return self._missing

    def _fail(self, error: ValueError) -> None:
        self._missing = None
        self.broken = f"the last weight update failed: {error}"

    def _target(self, name: str, weight: Tensor, path: Path) -> Tensor:
        target = self._tensors.get(name)
        if target is None:
            raise ValueError(f"{path}: the model has no weight {name!r}")
        if target.shape != weight.shape:
            raise ValueError(
                f"{path}: weight {name!r} has shape {tuple(weight.shape)}, "
                f"the model's has {tuple(target.shape)}"
            )
        if target.dtype != weight.dtype:
            raise ValueError(
                f"{path}: weight {name!r} is {weight.dtype}, the server's is {target.dtype}; "
                "start the server with the trainer's --dtype"
            )
        return target


def _saved_views(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Views of the parameters, one per saved tensor; a tied parameter appears once.

    ``transformers`` fuses the experts of a mixture into one parameter per projection and saves each
    expert on its own.
    """
    for name, parameter in model.named_parameters():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj" and prefix.endswith(".experts"):
            for expert, weight in enumerate(parameter.data):
                gate, up = weight.chunk(2, dim=0)
                yield f"{prefix}.{expert}.gate_proj.weight", gate
                yield f"{prefix}.{expert}.up_proj.weight", up
        elif last == "down_proj" and prefix.endswith(".experts"):
            for expert, weight in enumerate(parameter.data):
                yield f"{prefix}.{expert}.down_proj.weight", weight
        else:
            yield name, parameter.data
