"""The weight-transfer backend ``easyrl``: an update is the chunks of one verified artifact.

vLLM's broadcast engines get it mixed in: the trainer broadcasts version v to the endpoints that are
up; one that comes back in mid-batch takes it from the copy on the host, and the proof reads that
copy. Both use the same routes; the keys of what is sent tell which is meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

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


class ArtifactMixin:
    """Mixed in before one of vLLM's engines, which gets all that is not an artifact's.

    vLLM's worker calls start, update and finish in this order only. It closes the session if an
    update raises, but not if finish does: then an ``abandon`` from the trainer closes it there.
    """

    supports_draft_weight_update = False  # the proof reads the main model only
    update_info_cls: Any  # these four are the engine's
    model: Any
    model_config: Any
    device: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._artifact_receiver: WeightReceiver | None = None
        self._open_update: WeightUpdate | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        if "run" not in init_dict:
            return super().parse_init_info(init_dict)  # type: ignore[misc]
        return self._parsed(ArtifactInitInfo, "init_info", init_dict)

    def init_transfer_engine(self, init_info: Any) -> None:
        """Takes another announcement, or joins another group; after an error the former stays."""
        if isinstance(init_info, ArtifactInitInfo):
            receiver = WeightReceiver(asdict(init_info), pin_memory=self.device.type == "cuda")
            self._close_artifact_receiver()
            self._artifact_receiver = receiver
        else:
            # leaves the group before, whose members have changed; not meant for the artifacts,
            # which vllm-ascend's would shut down too
            kept, self._artifact_receiver = self._artifact_receiver, None
            try:
                super().shutdown()  # type: ignore[misc]
                super().init_transfer_engine(init_info)  # type: ignore[misc]
            finally:
                self._artifact_receiver = kept

    def opened_receiver(self) -> WeightReceiver:
        """The announced trainer's. Raises ``ValueError`` if there is none."""
        if self._artifact_receiver is None:
            raise ValueError("no trainer has announced itself; /init_weight_transfer_engine first")
        return self._artifact_receiver

    def start_weight_update(self) -> None:
        self._abandon_update()  # the worker has closed one that it could not even hand over
        self._open_update = WeightUpdate(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Raises ``ValueError`` and abandons the update if the chunks cannot be used."""
        broadcasts = self.update_info_cls is not ArtifactUpdateInfo
        if broadcasts and "artifact" not in update_info and "abandon" not in update_info:
            with self._opened_update() as update:
                update.take_from("a broadcast")
                super().update_weights(update_info)  # type: ignore[misc]
            return
        info = self._parsed(ArtifactUpdateInfo, "update_info", update_info)
        if info.abandon:
            self._abandon_update()
            raise ValueError("the weight update was abandoned, as asked for")
        with self._opened_update() as update:
            if not isinstance(info.artifact, str):
                raise ValueError("update_info: needs artifact and chunks")
            update.load(self.opened_receiver(), info.artifact, info.chunks)
        # not by the base class, which synchronizes an accelerator that a CPU has not
        synchronize(self.device)

    def finish_weight_update(self) -> None:
        """Raises ``ValueError`` and abandons the update if a tensor did not come."""
        with self._opened_update() as update:
            update.finish()
        self._open_update = None
        synchronize(self.device)

    def shutdown(self) -> None:
        self._close_artifact_receiver()
        super().shutdown()  # type: ignore[misc]

    def _parsed(self, kind: type, name: str, fields: dict[str, Any]) -> Any:
        try:
            return kind(**fields)
        except TypeError as error:
            raise ValueError(f"Invalid {name} for {type(self).__name__}: {error}") from None

    @contextmanager
    def _opened_update(self) -> Iterator[WeightUpdate]:
        """Raises ``ValueError`` if there is none; an error inside abandons it."""
        if self._open_update is None:  # its finish has failed
            raise ValueError("the weight update has failed; send {'abandon': true} to close it")
        try:
            yield self._open_update
        except BaseException:
            self._abandon_update()
            raise

    def _abandon_update(self) -> None:
        update, self._open_update = self._open_update, None
        if update is not None:
            update.abandon()

    def _close_artifact_receiver(self) -> None:
        receiver, self._artifact_receiver = self._artifact_receiver, None
        if receiver is not None:
            receiver.close()


class EasyRLWeightTransferEngine(
    ArtifactMixin, WeightTransferEngine[ArtifactInitInfo, ArtifactUpdateInfo]
):
    """Backend ``easyrl``, on any device.

    ``init_info``: ``{"run", "token", "root", "url"}``. ``update_info``: ``{"artifact", "chunks"}``
    or ``{"abandon": true}``, which gives an open update up and answers an error.
    """

    init_info_cls = ArtifactInitInfo
    update_info_cls = ArtifactUpdateInfo

    def receive_weights(self, update_info: ArtifactUpdateInfo) -> None:
        raise ValueError("update_info: needs artifact and chunks")

    def shutdown(self) -> None:
        self._close_artifact_receiver()
