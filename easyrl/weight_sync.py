"""Once per batch: the weights move to every endpoint and each proves what it serves (DESIGN §8)."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from easyrl.agreement import Agreement
from easyrl.canary import Canary, CanaryReading, compare, served_logprobs, trainer_logprobs
from easyrl.config import WeightSyncConfig
from easyrl.dataloaders.loop_thread import LoopThread
from easyrl.engines.base import TrainEngine
from easyrl.inference_client.errors import EndpointError, EndpointUnavailable
from easyrl.inference_client.pool import Endpoint, EndpointPool
from easyrl.inference_client.weight_transfer.artifact import WeightArtifact, write_artifact
from easyrl.schema import Completion, MicroBatch, PolicyVersion

logger = logging.getLogger(__name__)
T = TypeVar("T")

PUSH_ATTEMPTS = 2  # pushed, checked, pushed again, checked again, then excluded
WATCH_INTERVAL_S = 5.0  # between rank 0's questions on behalf of the other ranks
RETRY_INTERVAL_S = 1.0  # while an endpoint is restarting
VERSION_TIMEOUT_S = 10.0  # for the answer which version is served
NOISE_FACTOR = 5.0  # a change is visible above this multiple of the noise
LEAST_VISIBLE = 1e-3  # nats; below it a change could be float32 noise


class NoEndpointServes(RuntimeError):
    """No endpoint proved that it serves the weights of the next batch."""


@dataclass(frozen=True, slots=True)
class CheckedCanary:
    """What an endpoint sampled, and that it agrees with the trainer."""

    reading: CanaryReading
    samples: list[Completion]


class WeightSync:
    """Publishes a version of the weights. Every method but ``repair`` is called by all ranks.

    Consumes: the engine's weights. Waits for: every endpoint's confirmation. Is unblocked by: their
    answers. Produces: endpoints confirmed for the version, on every rank's pool.

    Args:
        tolerance: of the canary's mean |Δ log-prob|, nats.
        startup_timeout_s: how long an endpoint that does not answer may take to come back.
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
        startup_timeout_s: float = 60.0,
    ) -> None:
        self._config = config
        self._tolerance = tolerance
        self._engine = engine
        self._pool = pool
        self._thread = thread
        self._agreement = agreement
        self._canary = canary
        self._dummy = dummy
        self._startup_timeout_s = startup_timeout_s
        self._folder = config.directory / f"easyrl-{run_name}"
        self._served: WeightArtifact | None = None  # on rank 0
        self._served_version: str | None = None  # on every rank; None while the weights move
        self._watching: asyncio.Task[None] | None = None  # ends when the weights move
        # By URL, on rank 0:
        self._given: dict[str, str] = {}  # the version it serves unless it has restarted
        self._probed: set[str] = set()
        self._initialised: set[str] = set()  # its transfer engine is ready
        self._gone_since_s: dict[str, float] = {}  # unanswered since then
        self._moving: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def publish(self, version: PolicyVersion) -> dict[str, float]:
        """Brings ``version`` to all endpoints and confirms it. Collective.

        Raises ``NoEndpointServes`` naming each endpoint and what it showed.
        """
        start = time.monotonic()
        self._withdraw()
        self._notice_restarts()
        self._probe(version, self._unprobed())
        artifact = self._write(str(version))
        checked = self._deliver(artifact, self._usable(), canary=self._config.canary)
        if late := self._unprobed():  # restarted meanwhile
            self._probe(version, late)
            usable = [url for url in self._usable() if url in late]
            checked |= self._deliver(artifact, usable, canary=self._config.canary)
            again = "restarted again and again while it was given its weights"
            self._exclude(dict.fromkeys(self._unprobed(), again))
        old = self._served
        self._thread.run(self._confirm(artifact, str(version)))
        self._discard(old)
        metrics = {"time/sync_s": time.monotonic() - start}
        if checked:
            metrics["sync/canary_mean"] = max(c.reading.mean for c in checked.values())
            metrics["sync/canary_max"] = max(c.reading.maximum for c in checked.values())
        return metrics

    async def repair(self, endpoint: Endpoint) -> None:
        """Gives a restarted endpoint the served weights back and confirms it, on the pool's loop.

        Proof is its version and checksums; canary and probe follow with the next ``publish``. Rank
        0 has the weights and pushes, other ranks wait until it has. Returns without confirmation
        when the weights have moved on. Raises ``EndpointError`` if it fails.
        """
        version, artifact = self._served_version, self._served
        if version is None:
            return
        try:
            if self._agreement.rank != 0:
                await self._until_serving(endpoint, version)
            elif artifact is not None:
                await self._push_back(endpoint, artifact)
        except EndpointError:
            if self._served_version == version:
                raise
        if self._served_version == version:
            self._pool.confirm(endpoint, version)

    def close(self) -> None:
        """Ends repairs, removes the weights from the shared folder."""
        self._served_version = None
        if self._agreement.rank == 0 and self._folder.exists():
            shutil.rmtree(self._folder)

    # ---- the probe ---------------------------------------------------------------------------

    def _probe(self, version: PolicyVersion, urls: Sequence[str]) -> None:
        """Pushes visibly changed weights to ``urls`` and sees the change; true weights follow.

        An endpoint that keeps an old copy somewhere (a tied head, a cache) fails here, where the
        small steps of training would not show it.
        """
        if not urls:
            return
        with self._engine.perturbed_weights():
            artifact = self._write(f"{version}:probe")
            checked = self._deliver(artifact, urls, canary=True)  # without it nothing is seen
        self._discard(artifact)
        problems: dict[str, str] = {}
        for url in self._agreement.from_rank_zero(sorted(checked)):
            rows = self._canary.micro_batches(checked[url].samples) if url in checked else []
            true = trainer_logprobs(self._engine, self._agreement, rows, self._dummy)
            if self._agreement.rank == 0:
                visible = compare(served_logprobs(rows), true).mean
                noise = checked[url].reading.mean
                # Against the noise measured on the same samples, not against the tolerance: that
                # one is generous (5e-2 nats in bf16), and a small model's log-probabilities move
                # by less than it when its weights change by 5 %.
                needed = max(NOISE_FACTOR * noise, LEAST_VISIBLE)
                if visible > needed:
                    self._probed.add(url)
                else:
                    problems[url] = (
                        f"the probe's change moved log-probabilities by {visible:.2e} nats only, "
                        f"not visible above {needed:.2e} (noise {noise:.2e}); if the endpoint is "
                        "sound, switch weight_sync.probe off"
                    )
        self._exclude(self._agreement.from_rank_zero(problems))

    def _notice_restarts(self) -> None:
        """Endpoints that do not serve what they were given last have to be probed again."""
        if self._agreement.rank == 0:
            self._thread.run(self._ask_versions())

    async def _ask_versions(self) -> None:
        asked = [e for e in self._pool.endpoints if e.excluded is None and e.url in self._given]
        answers = await asyncio.gather(*(_try(self._has_restarted(e)) for e in asked))
        for endpoint, restarted in zip(asked, answers, strict=True):
            if isinstance(restarted, EndpointError):
                self._forget(endpoint.url)

    async def _has_restarted(self, endpoint: Endpoint) -> bool:
        """Whether it lost its weights since it was given some; forgets then what it proved."""
        served = await endpoint.client.weight_version(VERSION_TIMEOUT_S)
        restarted = served != self._given.get(endpoint.url)
        if restarted:
            self._forget(endpoint.url)
        return restarted

    def _forget(self, url: str) -> None:
        self._initialised.discard(url)
        self._probed.discard(url)

    def _unprobed(self) -> list[str]:
        """Usable endpoints that have to show the probe's change; the same on every rank."""
        due = [url for url in self._usable() if self._config.probe and url not in self._probed]
        unprobed: list[str] = self._agreement.from_rank_zero(due)
        return unprobed

    # ---- delivery ----------------------------------------------------------------------------

    def _deliver(
        self, artifact: WeightArtifact | None, urls: Sequence[str], *, canary: bool
    ) -> dict[str, CheckedCanary]:
        """Pushes to ``urls``, checks each; failures get a second push, then they are excluded.

        The canaries that passed, on rank 0. Collective; ``artifact`` is None except on rank 0.
        """
        pending = list(urls)
        problems: dict[str, str] = {}
        checked: dict[str, CheckedCanary] = {}
        for _ in range(PUSH_ATTEMPTS):
            problems = self._push(artifact, pending)
            if canary:
                pushed = [url for url in pending if url not in problems]
                problems |= self._check_canaries(pushed, checked)
            pending = [url for url in pending if url in problems]
            if not pending:
                break
            if self._agreement.rank == 0:
                for url in pending:
                    logger.warning("weight sync: %s: %s", url, problems[url])
        self._exclude(problems)
        return checked

    def _push(self, artifact: WeightArtifact | None, urls: Sequence[str]) -> dict[str, str]:
        """Problems by URL of pushing to ``urls`` at once; the same on every rank."""
        problems: dict[str, str] = {}
        if artifact is not None:
            pushes = [_try(self._push_patiently(self._endpoint(url), artifact)) for url in urls]
            results = self._thread.run(_gather(pushes))
            problems = {u: p for u, p in zip(urls, results, strict=True) if p is not None}
        agreed: dict[str, str] = self._agreement.from_rank_zero(problems)
        return agreed

    def _check_canaries(
        self, urls: Sequence[str], checked: dict[str, CheckedCanary]
    ) -> dict[str, str]:
        """Problems by URL, the same on every rank; what passed is added to ``checked``."""
        problems: dict[str, str] = {}
        for url in urls:
            rows: list[MicroBatch] = []
            samples: list[Completion] | EndpointError = []
            if self._agreement.rank == 0:
                samples = self._thread.run(_try(self._canary.sample(self._endpoint(url))))
                if not isinstance(samples, EndpointError):
                    rows = self._canary.micro_batches(samples)
            expected = trainer_logprobs(self._engine, self._agreement, rows, self._dummy)
            if self._agreement.rank != 0:
                continue
            reading = compare(served_logprobs(rows), expected)
            if isinstance(samples, EndpointError):
                problems[url] = f"canary: {samples}"
            elif len(expected) == 0:
                problems[url] = "canary: its samples hold no token to compare"
            elif not reading.mean <= self._tolerance:
                problems[url] = (
                    "canary: log-probabilities differ from the trainer's by "
                    f"{reading.mean:.2e} nats (maximum {reading.maximum:.2e}, "
                    f"tolerance {self._tolerance:.1e})"
                )
            else:
                checked[url] = CheckedCanary(reading, samples)
        agreed: dict[str, str] = self._agreement.from_rank_zero(problems)
        return agreed

    # ---- which endpoints, on every rank alike --------------------------------------------------

    def _withdraw(self) -> None:
        """No endpoint serves a known version from here on; what one rank excluded, all exclude."""
        self._thread.run(self._withdraw_confirmations())
        excluded = {e.url: e.excluded for e in self._pool.endpoints if e.excluded is not None}
        problems: dict[str, str] = {}
        for reasons in self._agreement.exchange(excluded):
            problems |= reasons
        self._exclude(problems)

    def _usable(self) -> list[str]:
        return [endpoint.url for endpoint in self._pool.endpoints if endpoint.excluded is None]

    def _exclude(self, problems: dict[str, str]) -> None:
        """Excludes by URL, for the same reasons on every rank. Raises if none is left."""
        self._thread.run(self._exclude_in_pool(problems))
        if not self._usable():
            reasons = "\n".join(f"  {e.url}: {e.excluded}" for e in self._pool.endpoints)
            raise NoEndpointServes(f"no endpoint is left that serves the weights:\n{reasons}")

    # The pool belongs to the producer's loop: what changes it runs there.

    async def _withdraw_confirmations(self) -> None:
        self._served_version = None  # ends repairs
        self._pool.withdraw_confirmations()

    async def _exclude_in_pool(self, problems: dict[str, str]) -> None:
        for endpoint in self._pool.endpoints:
            if endpoint.url in problems and endpoint.excluded is None:
                self._pool.exclude(endpoint, problems[endpoint.url])

    async def _confirm(self, artifact: WeightArtifact | None, version: str) -> None:
        self._served, self._served_version = artifact, version
        for endpoint in self._pool.endpoints:
            if endpoint.excluded is None:
                self._pool.confirm(endpoint, version)
        if self._agreement.rank == 0 and self._agreement.num_ranks > 1:
            self._watching = asyncio.create_task(self._watch(version))

    async def _watch(self, version: str) -> None:
        """Rank 0 may have no request left that would show it that an endpoint has restarted."""
        while self._served_version == version:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._served_version == version:
                await asyncio.gather(*map(self._pool.check_version, self._pool.endpoints))

    # ---- one endpoint ------------------------------------------------------------------------

    async def _push_patiently(
        self,
        endpoint: Endpoint,
        artifact: WeightArtifact,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Pushes while ``wanted``; repeats while the endpoint does not answer: it may restart."""
        while wanted():
            try:
                async with self._moving[endpoint.url]:
                    if wanted():  # the lock may have been waited for
                        await self._push_one(endpoint, artifact)
                self._gone_since_s.pop(endpoint.url, None)
                return
            except EndpointUnavailable:
                now_s = time.monotonic()
                gone_s = now_s - self._gone_since_s.setdefault(endpoint.url, now_s)
                if gone_s >= self._startup_timeout_s:
                    raise
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _push_one(self, endpoint: Endpoint, artifact: WeightArtifact) -> None:
        """All chunks to one endpoint, then version and checksum. Raises ``EndpointError``."""
        client = endpoint.client
        await self._has_restarted(endpoint)
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
        self._given[endpoint.url] = artifact.version
        served = await client.weight_version(VERSION_TIMEOUT_S)
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

    async def _push_back(self, endpoint: Endpoint, artifact: WeightArtifact) -> None:
        """The served weights once more; stops when they are no longer the served ones."""
        self._forget(endpoint.url)
        for attempts_left in reversed(range(PUSH_ATTEMPTS)):
            try:
                return await self._push_patiently(
                    endpoint, artifact, lambda: self._served_version == artifact.version
                )
            except EndpointError:
                if not attempts_left:
                    raise

    async def _until_serving(self, endpoint: Endpoint, version: str) -> None:
        """Waits for rank 0's repair."""
        deadline_s = time.monotonic() + self._startup_timeout_s
        while self._served_version == version:
            served: str | EndpointError = await _try(
                endpoint.client.weight_version(VERSION_TIMEOUT_S)
            )
            if served == version:
                return
            if time.monotonic() >= deadline_s:
                reason = f"serves {served}, not {version}, {self._startup_timeout_s:g} s later"
                raise EndpointUnavailable(endpoint.url, reason)
            await asyncio.sleep(RETRY_INTERVAL_S)

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

    def _discard(self, artifact: WeightArtifact | None) -> None:
        """Version *v* stays on the host until *v+1* is served."""
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
