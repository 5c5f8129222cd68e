"""The trainer of whichever checkout is first on the path, with the times of its functions.

``python traced_trainer.py SPANS.jsonl CONFIG [key=value …]`` runs ``easyrl.train`` with the
functions of ``TRACED`` wrapped, as far as that checkout has them, and appends one JSON object per
call. What it does not have goes to ``SPANS.missing.json``. Nothing of this checkout is imported, so
that an earlier commit can be run by it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# module:qualified name of the function → what the report calls it. One checkout may have what the
# other does not; what neither has is an error of ``benchmarks.batch_border``.
TRACED = {
    "easyrl.engines.deepspeed.engine:DeepSpeedEngine.forward_backward": "micro-batch",
    "easyrl.engines.deepspeed.engine:DeepSpeedEngine.optimizer_step": "clip and Adam",
    "easyrl.trainer.accumulation:Accumulator.accumulate": "accumulate",
    "easyrl.trainer.loop:Trainer._check": "account, check",
    "easyrl.ledger.journal.rollouts:JournalledRollouts.sync": "journal fsync",
    "easyrl.ledger.ledger:Ledger.close_batch": "certificate fsync",
    "easyrl.trainer.loop:Trainer._certify": "journals, account, certificate",
    "easyrl.trainer.loop:batch_metrics": "batch metrics",
    "easyrl.trainer.loop:Trainer._close": "batch counts: progress, events",
    "easyrl.trainer.loop:Trainer._count": "batch counts: progress, events",
    "easyrl.weight_sync.push:WeightPusher._prepare": "endpoint: pause, stamp updating",
    "easyrl.weight_sync.store:WeightStore.write": "write and hash weights",
    "easyrl.weight_sync.push:WeightPusher.push": "endpoint: push, all",
    "easyrl.weight_sync.proof:prove_weights": "endpoint: proof",
    "easyrl.weight_sync.proof:Prover.sample": "endpoint: canary samples",
    "easyrl.weight_sync.canary:Canary.ask_trainer": "canary: trainer",
    "easyrl.weight_sync.push:WeightPusher.stamp": "endpoint: stamp",
    "easyrl.weight_sync.confirm:ConfirmedEndpoints.confirm": "confirm",
    "easyrl.weight_sync.store:WeightStore.discard": "remove old weights",
    "easyrl.weight_sync.publish:WeightSync.publish": "publish, all",
    "easyrl.weight_sync.publish:WeightSync.settle": "settle: canary passed",
    "easyrl.trainer.loop:Trainer._begin_evaluation": "begin evaluation",
    "easyrl.metrics.reporter:StepReporter.report": "report",
    "easyrl.ledger.ledger:Ledger.save_if_due": "checkpoint copy",
    "easyrl.ledger.journal.rollouts:JournalledRollouts.begin": "prompts, dispatch",
    "easyrl.inference_client.pool.endpoint:Endpoint.begin": "request",
}


class Spans:
    """Appends ``{"name", "start", "end", "thread"}``, monotonic seconds."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def add(self, name: str, start: float) -> None:
        thread = "main" if threading.current_thread() is threading.main_thread() else "loop"
        span = {"name": name, "start": start, "end": time.monotonic(), "thread": thread}
        self._file.write(json.dumps(span).encode() + b"\n")

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                start = time.monotonic()
                try:
                    return await function(*args, **kwargs)
                finally:
                    self.add(name, start)

            return awaited

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(name, start)

        return called


def trace(spans: Spans) -> list[str]:
    """Wraps what there is of ``TRACED``; returns what there is not."""
    missing = []
    for place, name in TRACED.items():
        module_name, _, qualified = place.partition(":")
        *owners, last = qualified.split(".")
        try:
            owner: Any = importlib.import_module(module_name)
            for part in owners:
                owner = getattr(owner, part)
            setattr(owner, last, spans.around(name, getattr(owner, last)))
        except (ImportError, AttributeError):
            missing.append(place)
    return missing


def main() -> int:
    path = Path(sys.argv[1])
    path.with_suffix(".missing.json").write_text(json.dumps(trace(Spans(path))))
    from easyrl.train import main as train

    return train(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
