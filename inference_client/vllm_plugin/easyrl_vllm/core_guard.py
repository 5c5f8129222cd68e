"""No token of weights that owe a proof, in vLLM's engine core: all that could make one passes it.

Workers are no place for this: a forward pass that fails ends the engine. Calls for the workers,
requests and the end of a pause come to the core in one thread, whichever API server took them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .owed_proof import REFUSAL, OwedProof, has_promise

if TYPE_CHECKING:
    from vllm.v1.request import Request

ACCEPT = "easyrl_accept_proof"  # answered here, no worker knows it


class CoreGuard:
    """What one engine core was given, and whether it answers requests with an error.

    Attributes:
        refuses: it was resumed while it owed a proof: what comes fails at once, as requests of the
            embedded server do, and does not wait for a push that may never come.
    """

    def __init__(self) -> None:
        self.owed = OwedProof()
        self.refuses = False

    def before(self, method: Any, kwargs: Mapping[str, Any], *, is_paused: bool) -> None:
        """Workers are about to be called. Raises ``ValueError`` if they must not be."""
        if method != "update_weights":
            return
        chunks = _chunks(kwargs)
        if has_promise(chunks) and not is_paused:
            raise ValueError("generation goes on; chunks whose proof follows come behind /pause")
        self.owed.take(chunks)

    def after(self, method: Any, kwargs: Mapping[str, Any]) -> None:
        """All of them have done it."""
        if method == "start_weight_update":
            self.owed.begin()
            self.refuses = False
        elif method == "finish_weight_update":
            self.owed.finish()
        elif method == "easyrl_prove_weights" and kwargs["tensors"] != "{}":
            self.owed.answered(kwargs["nonce"])


def guard_engine_core() -> None:
    """Wraps methods of ``EngineCoreProc``; a second call changes nothing."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.request import RequestStatus

    rpc, resume, add = (
        EngineCoreProc.collective_rpc,
        EngineCoreProc.resume_scheduler,
        EngineCoreProc.add_request,
    )
    if hasattr(rpc, "easyrl_plain"):
        return

    @functools.wraps(rpc)
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        guard, named = _guard_of(self), kwargs or {}
        if method == ACCEPT:
            guard.owed.accept(named["nonce"])
            return [{}]
        guard.before(method, named, is_paused=self.is_scheduler_paused())
        replies = rpc(self, method, timeout, args, kwargs)
        guard.after(method, named)
        return replies

    @functools.wraps(resume)
    def resume_scheduler(self: Any) -> None:
        guard = _guard_of(self)
        guard.refuses = guard.owed.is_owed
        if not guard.refuses:
            resume(self)
            return
        from vllm.logger import init_logger

        init_logger(__name__).warning("Requests are refused: %s", REFUSAL)
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        for request in self.scheduler.finish_requests(None, RequestStatus.FINISHED_ERROR):
            _refuse(self, request)

    @functools.wraps(add)
    def add_request(self: Any, request: Request, request_wave: int = 0) -> None:
        if _guard_of(self).refuses:
            _refuse(self, request)
        else:
            add(self, request, request_wave)

    collective_rpc.easyrl_plain = rpc  # type: ignore[attr-defined]
    core: Any = EngineCoreProc
    core.collective_rpc = collective_rpc
    core.resume_scheduler = resume_scheduler
    core.add_request = add_request


def _guard_of(core: Any) -> CoreGuard:
    if not hasattr(core, "easyrl_guard"):
        core.easyrl_guard = CoreGuard()
    return core.easyrl_guard


def _refuse(core: Any, request: Request) -> None:
    core._send_error_outputs_to_client([request.request_id], request.client_index)


def _chunks(kwargs: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Of an update of any backend, for all workers or a part for each."""
    info = kwargs["update_info"]
    parts = info if isinstance(info, list) else [info]
    return [chunk for part in parts for chunk in part.get("chunks", ())]
