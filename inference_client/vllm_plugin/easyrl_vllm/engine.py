"""The weight-transfer backend ``easyrl``: an update is the chunks of one verified artifact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from .loading import WeightUpdate, synchronize
from .receiving import WeightReceiver


@dataclass
class ArtifactInitInfo(WeightTransferInitInfo):
    """What the trainer announces; see ``WeightReceiver``."""

    run: str
    token: str = field(repr=False)
    root: str | None = None
    url: str | None = None


@dataclass
class ArtifactUpdateInfo(WeightTransferUpdateInfo):
    """Chunks of an artifact, or ``abandon`` alone."""

    artifact: str | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)
    abandon: bool = False


class ArtifactUpdates:
    """Receives artifacts for an engine that has ``model``, ``model_config`` and ``device``.

    vLLM's worker calls start, update and finish in this order only. It closes the session if an
    update raises, but not if finish does: then an ``abandon`` from the trainer closes it there.
    """

    def __init__(self) -> None:
        self._receiver: WeightReceiver | None = None
        self._update: WeightUpdate | None = None

    def announce(self, init_info: Mapping[str, Any], pin_memory: bool) -> None:
        """Takes another trainer's announcement. Raises ``ValueError`` as ``WeightReceiver`` does.

        After an error the announcement before stays.
        """
        receiver = WeightReceiver(init_info, pin_memory=pin_memory)
        self.close()
        self._receiver = receiver

    def opened_receiver(self) -> WeightReceiver:
        """Raises ``ValueError`` before a trainer has announced itself."""
        if self._receiver is None:
            raise ValueError("no trainer has announced itself; /init_weight_transfer_engine first")
        return self._receiver

    def start(self, model: nn.Module, model_config: Any) -> None:
        self.abandon()  # the worker has closed one that it could not even hand over
        self._update = WeightUpdate(model, model_config)

    def load(self, info: ArtifactUpdateInfo) -> None:
        """Loads chunks. Raises ``ValueError`` and abandons the update if they cannot be used."""
        if info.abandon:
            self.abandon()
            raise ValueError("the weight update was abandoned, as asked for")
        with self.opened_update() as update:
            if not isinstance(info.artifact, str):
                raise ValueError("update_info: needs artifact and chunks")
            update.load(self.opened_receiver(), info.artifact, info.chunks)

    def finish(self) -> None:
        """Raises ``ValueError`` and abandons the update if a tensor did not come."""
        with self.opened_update() as update:
            update.finish()
        self._update = None

    @contextmanager
    def opened_update(self) -> Iterator[WeightUpdate]:
        """Raises ``ValueError`` if there is none; an error inside abandons it."""
        if self._update is None:  # its finish has failed
            raise ValueError("the weight update has failed; send {'abandon': true} to close it")
        try:
            yield self._update
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            update.abandon()

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


class EasyRLWeightTransferEngine(WeightTransferEngine[ArtifactInitInfo, ArtifactUpdateInfo]):
    """Backend ``easyrl``, on any device.

    ``init_info``: ``{"run", "token", "root", "url"}``. ``update_info``: ``{"artifact", "chunks"}``
    or ``{"abandon": true}``, which gives an open update up and answers an error.
    """

    init_info_cls = ArtifactInitInfo
    update_info_cls = ArtifactUpdateInfo
    supports_draft_weight_update = False  # the proof reads the main model only

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._artifacts = ArtifactUpdates()

    def init_transfer_engine(self, init_info: ArtifactInitInfo) -> None:
        self._artifacts.announce(asdict(init_info), pin_memory=self.device.type == "cuda")

    def opened_receiver(self) -> WeightReceiver:
        """The announced trainer's. Raises ``ValueError`` if there is none."""
        return self._artifacts.opened_receiver()

    def start_weight_update(self) -> None:
        self._artifacts.start(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # as the base class does, which synchronizes an accelerator that a CPU has not
        self.receive_weights(self.parse_update_info(update_info))
        synchronize(self.device)

    def receive_weights(self, update_info: ArtifactUpdateInfo) -> None:
        self._artifacts.load(update_info)

    def finish_weight_update(self) -> None:
        self._artifacts.finish()
        synchronize(self.device)

    def shutdown(self) -> None:
        self._artifacts.close()
