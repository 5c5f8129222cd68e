"""Once per batch: the weights move to every endpoint and each proves what it serves (DESIGN §8)."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from easyrl.agreement import Agreement
from easyrl.canary import Canary, CanaryReading, compare, served_logprobs, trainer_logprobs
from easyrl.config import WeightSyncConfig
from easyrl.dataloaders.loop_thread import LoopThread
from easyrl.engines.base import TrainEngine
from easyrl.inference_client.errors import EndpointError
from easyrl.inference_client.pool import Endpoint, EndpointPool
from easyrl.inference_client.weight_transfer.artifact import WeightArtifact, write_artifact
from easyrl.schema import Completion, MicroBatch, PolicyVersion

logger = logging.getLogger(__name__)
T = TypeVar("T")

PUSH_ATTEMPTS = 2  # pushed, checked, pushed again, checked again, then excluded


class NoEndpointServes(RuntimeError):
    """No endpoint proved that it serves the weights of the next batch."""


class WeightSync:
    """Publishes a version of the weights. Every method is called by all ranks.

    Consumes: the engine's weights. Waits for: every endpoint's confirmation. Is unblocked by: their
    answers. Produces: endpoints confirmed for the version, on every rank's pool.
    """

    def __init__(
        self,
        *,
        config: WeightSyncConfig,
        tolerance: float,
        run_name: str,
        engine: TrainEngine,
        pool: EndpointPool,
        thread: LoopThread,
        agreement: Agreement,
        canary: Canary,
        dummy: Callable[[], MicroBatch],
    ) -> None:
        self._config = config
        self._tolerance = tolerance
        self._engine = engine
        self._pool = pool
        self._thread = thread
        self._agreement = agreement
        self._canary = canary
        self._dummy = dummy
        self._folder = config.directory / f"easyrl-{run_name}"
        self._served: WeightArtifact | None = None
        self._probed = not config.probe
        self._initialised: set[str] = set()  # URLs whose transfer engine is ready

    def publish(self, version: PolicyVersion) -> dict[str, float]:
        """Brings ``version`` to all endpoints and confirms it. Collective.

        Raises ``NoEndpointServes`` naming each endpoint and what it showed.
        """
        start = time.monotonic()
        self._thread.run(self._withdraw_confirmations())
        if not self._probed:
            self._probe(version)
            self._probed = True
        artifact = self._write(str(version))
        readings = self._deliver(artifact, confirm_as=str(version))
        self._replace_artifact(artifact)
        metrics = {"time/sync_s": time.monotonic() - start}
        if readings:
            metrics["sync/canary_mean"] = max(r.mean for r in readings.values())
            metrics["sync/canary_max"] = max(r.maximum for r in readings.values())
        return metrics

    def close(self) -> None:
        """Removes the weights from the shared folder."""
        if self._agreement.rank == 0 and self._folder.exists():
            shutil.rmtree(self._folder)

    # ---- the probe ---------------------------------------------------------------------------

    def _probe(self, version: PolicyVersion) -> None:
        """Pushes visibly changed weights and sees the change; the true weights follow.

        An endpoint that keeps an old copy somewhere (a tied head, a cache) fails here, where the
        small steps of training would not show it.
        """
        with self._engine.perturbed_weights():
            artifact = self._write(f"{version}:probe")
            samples: dict[str, list[Completion]] = {}
            self._deliver(artifact, confirm_as=None, keep_samples=samples)
        self._discard(artifact)
        for url in self._agreement.from_rank_zero(sorted(samples)):
            rows = self._canary.micro_batches(samples[url]) if self._agreement.rank == 0 else []
            true = trainer_logprobs(self._engine, self._agreement, rows, self._dummy)
            if self._agreement.rank == 0:
                visible = compare(served_logprobs(rows), true).mean
                if visible < 2 * self._tolerance:
                    raise NoEndpointServes(
                        f"{url}: the probe's change moved log-probabilities by {visible:.2e} only, "
                        f"below twice the tolerance {self._tolerance:.1e}; lower "
                        "weight_sync.canary_tolerance"
                    )

    # ---- delivery ----------------------------------------------------------------------------

    def _deliver(
        self,
        artifact: WeightArtifact | None,
        confirm_as: str | None,
        keep_samples: dict[str, list[Completion]] | None = None,
    ) -> dict[str, CanaryReading]:
        """Pushes to every endpoint that is not excluded, checks each; failures get a second push.

        Collective; ``artifact`` is None except on rank 0.
        """
        pending = [e.url for e in self._pool.endpoints if e.excluded is None]
        problems: dict[str, str] = {}
        readings: dict[str, CanaryReading] = {}
        for _ in range(PUSH_ATTEMPTS):
            problems = self._push(artifact, pending)
            pushed = [url for url in pending if url not in problems]
            problems |= self._check_canaries(pushed, readings, keep_samples)
            pending = [url for url in pending if url in problems]
            if not pending:
                break
            if self._agreement.rank == 0:
                for url in pending:
                    logger.warning("weight sync: %s: %s", url, problems[url])
        self._conclude(problems, confirm_as)
        return readings

    def _push(self, artifact: WeightArtifact | None, urls: Sequence[str]) -> dict[str, str]:
        """Problems by URL of pushing to ``urls`` at once; the same on every rank."""
        problems: dict[str, str] = {}
        if artifact is not None:
            pushes = [_try(self._push_one(self._endpoint(url), artifact)) for url in urls]
            results = self._thread.run(_gather(pushes))
            problems = {u: p for u, p in zip(urls, results, strict=True) if p is not None}
        return self._agreement.from_rank_zero(problems)

    def _check_canaries(
        self,
        urls: Sequence[str],
        readings: dict[str, CanaryReading],
        keep_samples: dict[str, list[Completion]] | None,
    ) -> dict[str, str]:
        """Problems by URL of the canary; the same on every rank."""
        if not self._config.canary:
            return {}
        problems: dict[str, str] = {}
        for url in urls:
            rows: list[MicroBatch] = []
            if self._agreement.rank == 0:
                samples = self._thread.run(_try(self._canary.sample(self._endpoint(url))))
                if isinstance(samples, EndpointError):
                    problems[url] = f"canary: {samples}"
                else:
                    rows = self._canary.micro_batches(samples)
                    if keep_samples is not None:
                        keep_samples[url] = samples
            expected = trainer_logprobs(self._engine, self._agreement, rows, self._dummy)
            if rows:
                reading = compare(served_logprobs(rows), expected)
                readings[url] = reading
                if not reading.mean <= self._tolerance:
                    problems[url] = (
                        "canary: log-probabilities differ from the trainer's by "
                        f"{reading.mean:.2e} nats (maximum {reading.maximum:.2e}, "
                        f"tolerance {self._tolerance:.1e})"
                    )
        return self._agreement.from_rank_zero(problems)

    def _conclude(self, problems: dict[str, str], confirm_as: str | None) -> None:
        """Excludes what failed twice, confirms the others, on every rank's pool."""
        self._thread.run(self._exclude_and_confirm(problems, confirm_as))
        if all(endpoint.excluded is not None for endpoint in self._pool.endpoints):
            reasons = "\n".join(f"  {e.url}: {e.excluded}" for e in self._pool.endpoints)
            raise NoEndpointServes(f"no endpoint is left that serves the weights:\n{reasons}")

    # The pool belongs to the producer's loop: what changes it runs there.

    async def _withdraw_confirmations(self) -> None:
        self._pool.withdraw_confirmations()

    async def _exclude_and_confirm(self, problems: dict[str, str], confirm_as: str | None) -> None:
        for endpoint in self._pool.endpoints:
            if endpoint.url in problems:
                self._pool.exclude(endpoint, problems[endpoint.url])
            elif endpoint.excluded is None and confirm_as is not None:
                self._pool.confirm(endpoint, confirm_as)

    async def _push_one(self, endpoint: Endpoint, artifact: WeightArtifact) -> None:
        """All chunks to one endpoint, then version and checksum. Raises ``EndpointError``."""
        client = endpoint.client
        if endpoint.url not in self._initialised:
            await client.init_weight_transfer({})
            self._initialised.add(endpoint.url)
        await client.pause("wait")
        try:
            await client.start_weight_update()
            for update_info in artifact.update_infos():
                await client.update_weights(update_info)
            await client.finish_weight_update(artifact.version)
            await client.reset_prefix_cache()
        except EndpointError:
            self._initialised.discard(endpoint.url)  # it may have restarted
            raise
        finally:
            await client.resume()
        served = await client.weight_version()
        if served != artifact.version:
            raise EndpointError(
                endpoint.url, f"serves version {served!r}, not {artifact.version!r}"
            )
        checksums = await client.weight_checksums()
        wrong = [n for n, value in artifact.checksums.items() if checksums.get(n) != value]
        if wrong:
            raise EndpointError(
                endpoint.url, f"{len(wrong)} weights have another checksum, first {wrong[0]}"
            )

    # ---- the artefact ------------------------------------------------------------------------

    def _write(self, version: str) -> WeightArtifact | None:
        """Streams the weights into the shared folder on rank 0. Collective."""
        weights = self._engine.named_weights()
        if self._agreement.rank != 0:
            for _ in weights:
                pass
            return None
        directory = self._folder / version.replace(":", "-")
        return write_artifact(weights, directory, version, self._config.chunk_bytes)

    def _replace_artifact(self, artifact: WeightArtifact | None) -> None:
        """Version *v* stays on the host until *v+1* is served."""
        self._discard(self._served)
        self._served = artifact

    def _discard(self, artifact: WeightArtifact | None) -> None:
        if artifact is not None:
            artifact.remove()

    def _endpoint(self, url: str) -> Endpoint:
        return next(endpoint for endpoint in self._pool.endpoints if endpoint.url == url)


async def _try(work: Awaitable[T]) -> T | EndpointError:
    """The result, or the ``EndpointError`` it raised."""
    try:
        return await work
    except EndpointError as error:
        return error


async def _gather(pushes: Sequence[Awaitable[None | EndpointError]]) -> list[str | None]:
    return [None if error is None else str(error) for error in await asyncio.gather(*pushes)]
