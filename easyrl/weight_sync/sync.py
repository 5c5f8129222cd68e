"""Once per batch: the weights move to every endpoint and each proves what it serves (DESIGN §8)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

from torch import Tensor

from easyrl.config import WeightSyncConfig
from easyrl.dataloaders.producer.loop_thread import LoopThread
from easyrl.engines.base import TrainEngine
from easyrl.inference_client.errors import (
    EndpointError,
    EndpointUnavailable,
    NoEndpointError,
    Outage,
)
from easyrl.inference_client.pool.pool import Endpoint, EndpointPool
from easyrl.inference_client.transfer.artifact import weights_digest
from easyrl.runtime.collectives import Agreement
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import (
    Completion,
    Confirmation,
    MicroBatch,
    PolicyVersion,
    Published,
    ServedWeights,
    StopRequested,
)
from easyrl.weight_sync.broadcasting import Broadcaster, OpenGroup, device_broadcast
from easyrl.weight_sync.canary import Canary, CanaryReading, Expected
from easyrl.weight_sync.delivery import WeightPusher, WeightStream, still_answers
from easyrl.weight_sync.feed import Feed
from easyrl.weight_sync.proof import Probe, ProofFailed, check_canary
from easyrl.weight_sync.repair import Repairs, Served
from easyrl.weight_sync.round import PUSH_ATTEMPTS, Round, Spans, WeightRounds
from easyrl.weight_sync.store import WeightStore

logger = logging.getLogger(__name__)


class NoEndpointServes(RuntimeError):
    """No endpoint proved that it serves the weights of the next batch."""


@dataclass(slots=True)
class Delivery:
    """How one version reached the endpoints, by URL. ``passed`` is the same on every rank.

    All else is rank 0's.
    """

    weights: WeightStream | None
    num_broadcast: int | None = None  # endpoints that a broadcast reached; None: never asked for
    passed: list[str] = field(default_factory=list)
    samples: dict[str, list[Completion]] = field(default_factory=dict)
    expected: dict[str, Expected] = field(default_factory=dict)
    readings: dict[str, CanaryReading] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    spans: Spans = field(default_factory=Spans)

    def metrics(self) -> dict[str, float]:
        found = {
            "time/proof_s": self.spans.proof_s,
            "time/canary_s": self.spans.canary_s,
            "sync/endpoints": float(len(self.passed)),
        }
        if self.weights is not None:
            found["sync/bytes"] = float(self.weights.num_bytes)
        if self.num_broadcast is not None:
            found["sync/broadcast"] = float(self.num_broadcast)
        if self.readings:
            found["sync/canary_mean"] = max(r.mean for r in self.readings.values())
            found["sync/canary_max"] = max(r.maximum for r in self.readings.values())
        return found


class WeightSync:
    """Publishes a version of the weights. Every method but ``repair`` is called by all ranks.

    Consumes: the engine's weights. Waits for: the proof of the endpoints that are up. Is unblocked
    by: their answers. Produces: endpoints confirmed for the version, on every rank's pool.

    Args:
        tolerance: of the canary's mean |Δ log-prob|, nats.
        stop: ends the waiting for an endpoint.
        startup_timeout_s: how long another rank waits for rank 0 to repair an endpoint.
        max_outage_s: how long all endpoints may be down.
        api_key: the endpoints' bearer token, for a broadcast's own requests.
        open_group: of a broadcast; default: what the transport says.
    Raises:
        ValueError: the transport's package is not installed.
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
        stop: StopRequest | None = None,
        startup_timeout_s: float = 60.0,
        max_outage_s: float = 1800.0,
        api_key: str | None = None,
        open_group: OpenGroup | None = None,
    ) -> None:
        self._config = config
        self._tolerance = tolerance
        self._engine = engine
        self._pool = pool
        self._thread = thread
        self._agreement = agreement
        self._canary = canary
        self._dummy = dummy
        self._stop = stop
        self._max_outage_s = max_outage_s
        self._store = WeightStore(config, run_name)  # used on rank 0 only
        self._current: WeightStream | None = None  # stays on the host until the next is served
        self._broadcaster: Broadcaster | None = None  # used on rank 0 only
        if config.transport in ("nccl", "hccl"):
            open_group = open_group or device_broadcast(config, api_key)
            self._broadcaster = Broadcaster(open_group, config.timeout_s)
        self._rounds = WeightRounds(
            WeightPusher(self._store),
            canary,
            tolerance=tolerance,
            prove=config.prove,
            broadcaster=self._broadcaster,
        )
        self._repairs = Repairs(
            pool, self._rounds, pushes=agreement.rank == 0, patience_s=startup_timeout_s
        )

    @property
    def confirmations(self) -> tuple[Confirmation, ...]:
        """Of the endpoints that serve the published version, those that came later included.

        On rank 0 of all, on another rank of those that it uses.
        """
        return self._repairs.confirmations

    def publish(self, version: PolicyVersion) -> Published:
        """Brings ``version`` to the endpoints that are up and confirms it. Collective.

        Those that are down are brought to it by ``repair`` when they return. Raises
        ``NoEndpointServes`` naming each endpoint and what it showed, ``Outage`` when none was up
        for ``max_outage_s``, or ``StopRequested`` while it waited for one; each on all ranks.
        """
        start_s = time.monotonic()
        self._withdraw()
        probe_s = self._learn_probe(version) if self._is_probe_due() else 0.0
        delivery = self._deliver(str(version), canary=self._config.canary)
        served = self._share(delivery)
        readings = {url: delivery.readings.get(url) for url in delivery.passed}
        self._thread.run(self._repairs.go_on(served, readings))
        self._store.discard(self._current)  # the version before has been served until here
        self._current = delivery.weights
        metrics = {
            "time/sync_s": time.monotonic() - start_s,
            "time/probe_s": probe_s + delivery.spans.probe_s,
        }
        return Published(
            ServedWeights(version, weights_digest(served.weights.chunks)),
            metrics | delivery.metrics(),
        )

    async def repair(self, endpoint: Endpoint) -> None:
        """Brings an endpoint that was down, or is new, to the served version, on the pool's loop.

        It proves there what every endpoint proves, without the trainer: against what the trainer
        said of the others' samples. Rank 0 has the weights and pushes, other ranks wait until it
        has. Waits while the weights move. Raises ``EndpointUnavailable`` if it is gone again,
        another ``EndpointError`` if it failed its proof.
        """
        await self._repairs.repair(endpoint)

    def close(self) -> None:
        """Ends repairs, leaves the broadcast, removes the weights from the shared folder."""
        self._thread.run(self._repairs.end())
        if self._broadcaster is not None:
            self._broadcaster.close()
        self._store.close()

    # ---- the probe -----------------------------------------------------------------------------

    def _is_probe_due(self) -> bool:
        """Whether this attempt of the run has no probe yet; the same on every rank."""
        due: bool = self._agreement.from_rank_zero(
            self._config.probe and self._rounds.probe is None
        )
        return due

    def _learn_probe(self, version: PolicyVersion) -> float:
        """Pushes visibly changed weights and sees the change; true weights have to follow.

        What the trainer says under the changed weights is kept, for endpoints that come later.
        Returns the seconds it took.
        """
        start_s = time.monotonic()
        while self._is_probe_due():
            with self._engine.perturbed_weights():
                delivery = self._deliver(f"{version}:probe", canary=True)
            true = self._ask_trainer(delivery.samples)
            problems: dict[str, str] = {}
            for url, samples in delivery.samples.items():
                assert delivery.weights is not None
                probe = Probe(delivery.weights, delivery.expected[url], true[url])
                if problem := probe.check(samples, self._tolerance):
                    problems[url] = problem
                else:
                    self._rounds.probe = probe
                    self._rounds.trust(url, probe.visible(samples))
            self._exclude(self._agreement.from_rank_zero(problems))
            if self._rounds.probe is None:
                self._store.discard(delivery.weights)
        return time.monotonic() - start_s

    # ---- delivery ------------------------------------------------------------------------------

    def _deliver(self, version: str, *, canary: bool) -> Delivery:
        """Writes the weights and brings them to every live endpoint until at least one has passed.

        The first push goes on while the weights are gathered and written. What fails is pushed once
        more from the finished artefact, then excluded. Collective.
        """
        weights = self._store.begin(version) if self._agreement.rank == 0 else None
        delivery = Delivery(weights)
        written = False
        deadline_s = time.monotonic() + self._max_outage_s
        while urls := self._next_urls(delivery, deadline_s):
            result = self._push(urls, weights, canary=canary, write=not written)
            written = True
            if canary:
                self._check_canaries(result, delivery)
            self._exclude(self._settle(result, delivery))
        return delivery

    def _next_urls(self, delivery: Delivery, deadline_s: float) -> list[str]:
        """Endpoints to push to, on every rank the same; none when enough have passed.

        Rank 0's reasons to stop are raised on every rank.
        """
        answer: dict[str, list[str] | str] = {}
        if self._agreement.rank == 0:
            try:
                answer["urls"] = self._choose_unless_stopped(delivery, deadline_s)
            except StopRequested as error:
                answer["stop"] = str(error)
            except Outage as error:
                answer["outage"] = str(error)
            except (NoEndpointServes, NoEndpointError) as error:
                answer["nobody"] = str(error)
        agreed = self._agreement.from_rank_zero(answer)
        if "nobody" in agreed:
            raise NoEndpointServes(agreed["nobody"])
        if "outage" in agreed:
            raise Outage(agreed["outage"])
        if "stop" in agreed:
            raise StopRequested(agreed["stop"])
        urls: list[str] = agreed["urls"]
        return urls

    def _choose_unless_stopped(self, delivery: Delivery, deadline_s: float) -> list[str]:
        choosing = self._thread.submit(self._choose(delivery, deadline_s))
        if self._stop is None:
            return choosing.result()
        with self._stop.wakes(lambda _: choosing.cancel()):
            try:
                return choosing.result()
            except CancelledError:
                self._stop.raise_if_requested()
                raise

    async def _choose(self, delivery: Delivery, deadline_s: float) -> list[str]:
        """Live endpoints that have not passed: all at first, then those that have failed once.

        While none has passed, also those that have come back, waiting for them.
        """
        untried = not (delivery.passed or delivery.failures)
        while True:
            due = [
                endpoint.url
                for endpoint in self._pool.endpoints
                if endpoint.is_up
                if endpoint.url not in delivery.passed
                if untried or delivery.failures[endpoint.url] or not delivery.passed
            ]
            if due or delivery.passed:
                return due
            excluded = {e.url: e.excluded for e in self._pool.endpoints if e.excluded is not None}
            if excluded and len(excluded) == len(self._pool.endpoints):
                reasons = "\n".join(f"  {url}: {reason}" for url, reason in excluded.items())
                raise NoEndpointServes(f"no endpoint is left that serves the weights:\n{reasons}")
            await self._pool.until_live(max(deadline_s - time.monotonic(), 0.0))

    def _push(
        self, urls: Sequence[str], weights: WeightStream | None, *, canary: bool, write: bool
    ) -> Round:
        """One push to ``urls``, while the weights are written if ``write``. Collective if so."""
        if weights is None:
            if write:
                for _ in self._engine.named_weights():
                    pass
            return Round()
        endpoints = [endpoint for endpoint in self._pool.endpoints if endpoint.url in urls]
        feed = self._broadcaster.begin() if write and self._broadcaster is not None else None
        running = self._thread.submit(
            self._rounds.deliver(endpoints, weights, canary=canary, feed=feed)
        )
        if feed is not None:
            running.add_done_callback(lambda _: feed.close())
        try:
            if write:
                self._store.write(weights, self._named_weights(feed), self._thread.loop)
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def _named_weights(self, feed: Feed | None) -> Iterator[tuple[str, Tensor]]:
        """The engine's, of which the broadcast takes what it needs on the way. Rank 0."""
        named_weights = self._engine.named_weights()
        if self._broadcaster is None:
            return named_weights
        if feed is None:
            return self._broadcaster.note(named_weights)
        return feed.pass_on(named_weights)

    def _check_canaries(self, result: Round, delivery: Delivery) -> None:
        """Asks the trainer; what fails moves to ``failed``. Collective."""
        start_s = time.monotonic()
        expected = self._ask_trainer(result.samples)
        for url, samples in result.samples.items():
            reading = expected[url].reading(samples)
            if problem := check_canary(reading, self._rounds.tolerance(url)):
                result.failed[url] = ProofFailed(url, problem)
                result.served.remove(url)
            else:
                delivery.samples[url] = samples
                delivery.expected[url] = expected[url]
                delivery.readings[url] = reading
                self._rounds.is_back(url)
        result.spans.canary_s += time.monotonic() - start_s

    def _settle(self, result: Round, delivery: Delivery) -> dict[str, str]:
        """Books the round; reasons by URL to exclude endpoints, the same on every rank."""
        excluded: dict[str, str] = {}
        if self._agreement.rank == 0:
            delivery.spans.add(result.spans)
            if self._broadcaster is not None:
                delivery.num_broadcast = (delivery.num_broadcast or 0) + len(result.broadcast)
            excluded = self._thread.run(self._judge(result.failed, delivery.failures))
        agreed = self._agreement.from_rank_zero({"served": result.served, "excluded": excluded})
        delivery.passed += agreed["served"]
        reasons: dict[str, str] = agreed["excluded"]
        return reasons

    async def _judge(
        self, failed: dict[str, EndpointError], failures: Counter[str]
    ) -> dict[str, str]:
        """An endpoint that does not answer is set aside; one that answers has failed.

        Reasons by URL of those that have failed too often.
        """
        endpoints = [endpoint for endpoint in self._pool.endpoints if endpoint.url in failed]
        up = await asyncio.gather(*(_is_up(e, failed[e.url]) for e in endpoints))
        excluded = {}
        for endpoint, is_up in zip(endpoints, up, strict=True):
            url, error = endpoint.url, failed[endpoint.url]
            if not is_up:
                if endpoint.down is None:
                    self._pool.set_aside(endpoint, error)
                continue
            self._rounds.distrust(url)
            failures[url] += 1
            logger.warning("weight sync: %s", error)
            if failures[url] >= PUSH_ATTEMPTS:
                excluded[url] = error.reason
        return excluded

    def _ask_trainer(self, samples: dict[str, list[Completion]]) -> dict[str, Expected]:
        return self._canary.ask_trainer(samples, self._engine, self._agreement, self._dummy)

    def _share(self, delivery: Delivery) -> Served:
        """What every rank needs to have endpoints prove the version later. Collective."""
        expected = next(iter(delivery.expected.values()), None)
        mine = None if delivery.weights is None else Served(delivery.weights, expected)
        if self._agreement.num_ranks == 1:
            assert mine is not None
            return mine
        record = self._agreement.from_rank_zero(None if mine is None else mine.to_json())
        return mine or Served.from_json(record)

    # ---- the pool, which belongs to the producer's loop ----------------------------------------

    def _withdraw(self) -> None:
        """No endpoint serves a known version from here on; what rank 0 excluded, all exclude."""
        self._thread.run(self._repairs.suspend())
        excluded = {e.url: e.excluded for e in self._pool.endpoints if e.excluded is not None}
        self._exclude(self._agreement.from_rank_zero(excluded))

    def _exclude(self, problems: dict[str, str]) -> None:
        """Excludes by URL; a pool may not know an endpoint yet, or no longer."""
        self._thread.run(self._exclude_in_pool(problems))

    async def _exclude_in_pool(self, problems: dict[str, str]) -> None:
        for endpoint in self._pool.endpoints:
            if endpoint.url in problems and endpoint.excluded is None:
                self._pool.exclude(endpoint, problems[endpoint.url])


async def _is_up(endpoint: Endpoint, error: EndpointError) -> bool:
    """Whether ``error`` was an answer."""
    if not isinstance(error, EndpointUnavailable):
        return True
    return endpoint.down is None and await still_answers(endpoint)
