"""The commands that read or write the served weights, in a thread of their own.

Reading an artifact may take long, or hang with the trainer that serves it; meanwhile the engine
answers everything else. Whether an update is open is decided in the engine's thread, between two
decode steps, so that no step sees half of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from easyrl.inference_client.servers.embedded.weights import ServedProof, ServedWeights

T = TypeVar("T")


class InEngine(Protocol):
    """Runs a function in the engine's thread between two steps."""

    def __call__(self, function: Callable[[], T], /) -> Future[T]: ...


class WeightUpdates:
    """One command after the other; each gives a future with the errors of ``ServedWeights``.

    Args:
        weights: what is served.
        in_engine: runs a function between two decode steps.
        on_start: called there when an update opens.
        on_finish: called there when new weights are served.
    """

    def __init__(
        self,
        weights: ServedWeights,
        in_engine: InEngine,
        on_start: Callable[[], None],
        on_finish: Callable[[], None],
    ) -> None:
        self._weights = weights
        self._in_engine = in_engine
        self._on_start = on_start
        self._on_finish = on_finish
        self._thread = ThreadPoolExecutor(1, "embedded-weights")

    def announce(self, init_info: Mapping[str, Any]) -> Future[None]:
        """Takes another trainer's announcement (``WeightReceiver``)."""
        return self._thread.submit(self._weights.announce, init_info)

    def start(self) -> Future[None]:
        """Opens an update; generation holds until it is finished or has failed."""

        def open_it() -> None:
            self._weights.start()
            self._on_start()

        return self._thread.submit(lambda: self._in_engine(open_it).result())

    def load(self, artifact: str, chunks: Sequence[Mapping[str, Any]]) -> Future[None]:
        """Takes chunks of an artifact; an error ends the update."""

        def run() -> None:
            try:
                self._weights.load(artifact, chunks)
            except BaseException as error:
                reason = str(error)
                self._in_engine(lambda: self._weights.abandon(reason)).result()
                raise

        return self._thread.submit(run)

    def abandon(self) -> Future[None]:
        """Closes an update that is open."""

        def give_up() -> None:
            self._weights.abandon("it was abandoned")

        return self._thread.submit(lambda: self._in_engine(give_up).result())

    def finish(self, version: str | None) -> Future[None]:
        """Closes the update and serves the new weights."""

        def close_it() -> None:
            self._weights.finish(version)
            self._on_finish()

        return self._thread.submit(lambda: self._in_engine(close_it).result())

    def checksums(self) -> Future[dict[str, str]]:
        return self._thread.submit(self._weights.checksums)

    def prove(self, expected: Mapping[str, str]) -> Future[ServedProof]:
        """Compares what is served with an artifact's hashes."""
        return self._thread.submit(self._weights.prove, expected)

    def close(self) -> None:
        """Ends the thread and the connection to the trainer."""
        self._weights.close()
        self._thread.shutdown(cancel_futures=True)
