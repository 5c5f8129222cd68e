"""Worker errors as values, so that tensor-parallel workers stay in step.

vLLM 0.32's multiprocess executor stops reading replies at the first worker that failed, and the
next call takes the replies that were left over for its own (vLLM issue 58242, pull request 57846).
So for the calls that may fail here, workers reply what went wrong instead of failing, and the
executor raises it once all replies are read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

GUARDED = {
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "easyrl_prove_weights",
    "easyrl_receive_adapter",
    "easyrl_prove_adapter",
    "add_lora",
}


@dataclass(frozen=True)
class Failure:
    """A worker's reply when the call raised."""

    message: str


@dataclass(frozen=True)
class Guarded:
    """Calls a worker's method by name; an exception becomes the reply."""

    method: str

    def __call__(self, worker: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(worker, self.method)(*args, **kwargs)
        except Exception as error:  # travels to the executor, which raises it
            from vllm.logger import init_logger

            init_logger(__name__).exception("%s failed", self.method)
            return Failure(f"{type(error).__name__}: {error}")


def keep_replies_in_step() -> None:
    """Wraps ``MultiprocExecutor.collective_rpc``; a second call changes nothing."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    plain = MultiprocExecutor.collective_rpc
    if hasattr(plain, "easyrl_plain"):
        return

    @functools.wraps(plain)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method not in GUARDED:
            return plain(self, method, *args, **kwargs)
        replies = plain(self, Guarded(method), *args, **kwargs)
        for rank, reply in enumerate(replies):
            if isinstance(reply, Failure):
                raise RuntimeError(f"worker {rank}: {reply.message}")
        return replies

    collective_rpc.easyrl_plain = plain  # type: ignore[attr-defined]
    MultiprocExecutor.collective_rpc = collective_rpc
