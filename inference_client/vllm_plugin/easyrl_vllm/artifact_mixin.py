"""A mixin for vLLM's broadcast engines that takes artifacts too, in one weight-transfer engine.

The trainer broadcasts version v to the endpoints that are up; one that comes back in mid-batch
takes it from the copy on the host, and the proof reads that copy. Both use the same routes; the
keys of what is sent tell which is meant.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .engine import ArtifactInitInfo, ArtifactUpdateInfo, ArtifactUpdates
from .loading import synchronize
from .receiving import WeightReceiver


class ArtifactMixin:
    """Mixed in before one of vLLM's engines, which gets all that is not an artifact's.

    ``init_info`` with ``run`` and ``update_info`` with ``artifact`` or ``abandon`` are as in the
    backend ``easyrl``.
    """

    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._artifacts = ArtifactUpdates()

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        if "run" not in init_dict:
            return super().parse_init_info(init_dict)  # type: ignore[misc]
        return _parsed(ArtifactInitInfo, init_dict)

    def init_transfer_engine(self, init_info: Any) -> None:
        if isinstance(init_info, ArtifactInitInfo):
            self._artifacts.announce(asdict(init_info), pin_memory=self.device.type == "cuda")  # type: ignore[attr-defined]
        else:
            # leaves the group before, whose members have changed; not meant for the artifacts,
            # which vllm-ascend's would shut down too
            artifacts, self._artifacts = self._artifacts, ArtifactUpdates()
            try:
                super().shutdown()  # type: ignore[misc]
                super().init_transfer_engine(init_info)  # type: ignore[misc]
            finally:
                self._artifacts = artifacts

    def opened_receiver(self) -> WeightReceiver:
        """The announced trainer's. Raises ``ValueError`` if there is none."""
        return self._artifacts.opened_receiver()

    def start_weight_update(self) -> None:
        self._artifacts.start(self.model, self.model_config)  # type: ignore[attr-defined]

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if "artifact" in update_info or "abandon" in update_info:
            self._artifacts.load(_parsed(ArtifactUpdateInfo, update_info))
            synchronize(self.device)  # type: ignore[attr-defined]
        else:
            with self._artifacts.opened_update() as update:
                update.take_from("a broadcast")
                super().update_weights(update_info)  # type: ignore[misc]

    def finish_weight_update(self) -> None:
        self._artifacts.finish()
        synchronize(self.device)  # type: ignore[attr-defined]

    def shutdown(self) -> None:
        self._artifacts.close()
        super().shutdown()  # type: ignore[misc]


def _parsed(kind: type, fields: dict[str, Any]) -> Any:
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None
