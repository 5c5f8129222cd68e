"""Publishing: once per batch a version goes to every endpoint, and each proves it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace

from easyrl.config import LoraConfig, WeightSyncConfig
from easyrl.engines.base import TrainEngine
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.errors import EndpointError
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.shared_cores import SharedCores
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import (
    Confirmation,
    InterruptedRun,
    MicroBatch,
    PolicyVersion,
    Published,
    ServedWeights,
    StopRequested,
)
from easyrl.weight_sync.adapter import AdapterChoice
from easyrl.weight_sync.broadcasting import Broadcaster, OpenGroup, device_broadcast
from easyrl.weight_sync.canary import Canary, Expected
from easyrl.weight_sync.confirm import ConfirmedEndpoints
from easyrl.weight_sync.delivery import Deliverer, Delivery, split_outcomes
from easyrl.weight_sync.fan_out import FanOut
from easyrl.weight_sync.proof import PROBE, Probe, Prover, Shown
from easyrl.weight_sync.push import WeightPusher
from easyrl.weight_sync.reconcile import Reconciler
from easyrl.weight_sync.shares import Shares
from easyrl.weight_sync.store import WeightStore
from easyrl.weight_sync.target import Target


@dataclass(kw_only=True)
class WeightSync:
    """Publishes a version of the weights. Every method is called by all ranks.

    Raises ``ValueError`` if the transport's package is not installed.

    Attributes:
        tolerance: of the canary's mean |Δ log-prob|, nats.
        stop: ends the waiting for an endpoint.
        startup_timeout_s: how long another rank waits for rank 0 to repair an endpoint.
        max_outage_s: how long all endpoints may be down.
        api_keys: the endpoints' bearer tokens, for a broadcast's own requests.
        open_group: of a broadcast; default: what the transport says.
        cores: on which the trainer answers for the canaries.
        lora: the policy's adapters; None: it has none.
        shares: of a split model, whose stages write their weights each by itself.
    """

    config: WeightSyncConfig
    tolerance: float
    run_name: str
    engine: TrainEngine
    pool: EndpointPool
    thread: LoopThread
    collectives: Collectives
    canary: Canary
    dummy: Callable[[], MicroBatch]
    stop: StopRequest
    startup_timeout_s: float = 60.0
    max_outage_s: float = 1800.0
    api_keys: ApiKeys = field(default_factory=ApiKeys)
    open_group: OpenGroup | None = None
    cores: SharedCores = field(default_factory=SharedCores)
    lora: LoraConfig | None = None
    shares: Shares | None = None

    def __post_init__(self) -> None:
        config = self.config
        self._prover = Prover(self.canary, self.tolerance, reads_bits=config.prove)
        self._broadcaster: Broadcaster | None = None
        if config.transport in ("nccl", "hccl"):
            open_group = self.open_group or device_broadcast(config, self.api_keys)
            self._broadcaster = Broadcaster(open_group, config.timeout_s)
        # used on rank 0 only, as are the next two
        self._store = WeightStore(config, self.run_name)
        pusher = WeightPusher(
            self._store, self._broadcaster, proof_follows=config.prove, names=self.pool.adapters
        )
        self._reconciler = Reconciler(self.pool, pusher, self._prover, config.timeout_s)
        self._current: Target | None = None  # stays on the host until the next is served
        self._delivery = Deliverer(
            engine=self.engine,
            pool=self.pool,
            thread=self.thread,
            collectives=self.collectives,
            canary=self.canary,
            dummy=self.dummy,
            stop=self.stop,
            max_outage_s=self.max_outage_s,
            store=self._store,
            reconciler=self._reconciler,
            broadcaster=self._broadcaster,
            cores=self.cores,
            shares=self.shares,
        )
        self._adapter_choice: AdapterChoice | None = AdapterChoice(
            wanted=config.lora,
            lora=self.lora,
            engine=self.engine,
            pool=self.pool,
            thread=self.thread,
            collectives=self.collectives,
            store=self._store,
            prover=self._prover,
        )  # until it is made
        self._canaries: tuple[FanOut, Future[dict[str, Shown | EndpointError]]] | None = None
        self._owing: dict[str, Shown] = {}  # by URL, what those have shown that owe their canary
        mine = self._reconciler if self.collectives.ranks.rank == 0 else None
        self.confirmed = ConfirmedEndpoints(self.pool, self._prover, mine, self.startup_timeout_s)

    @property
    def confirmations(self) -> tuple[Confirmation, ...]:
        """Of all endpoints that serve the published version; on other ranks of those they use."""
        return self.confirmed.confirmations

    def publish(
        self,
        version: PolicyVersion,
        meanwhile: Callable[[], object] = lambda: None,
        *,
        canary_follows: bool = False,
    ) -> Published:
        """Brings ``version`` to the endpoints that are up and confirms it. Collective.

        With ``canary_follows``, ``settle`` has to be called before a response of this version is
        waited for: the canary of endpoints that have proved their bits, and passed canaries before,
        runs beside their first requests, and their responses are held back until they have passed.

        ``meanwhile`` is called on every rank while endpoints load and prove the weights: each time
        these are written, which damage on rank 0's host may bring about again. Not before they
        are, so not where an error comes first.

        Those that are down are brought to it when they return; what is damaged on rank 0's host is
        written again. Raises ``NoEndpointServes`` naming each endpoint and what it showed,
        ``Outage`` when none was up for ``max_outage_s`` or none had passed when ``MOST_WRITES``
        copies were damaged, ``StopRequested`` while it waited for one, ``InterruptedRun`` if a
        proof has failed too late to withdraw anything of the batch before; each on all ranks.
        """
        start_s = time.monotonic()
        self._withdraw()
        self._refuse_late_doubts(version)
        if self._adapter_choice is not None:
            self._delivery.adapter = self._adapter_choice.decide(version)
            self._adapter_choice = None
        target, metrics = self._bring(version, meanwhile, canary_follows=canary_follows)
        metrics["time/sync_s"] = time.monotonic() - start_s
        return Published(ServedWeights(version, target.digest), metrics)

    def settle(self, published: Published) -> Published:
        """Waits for the canaries that follow; ``published`` with their figures. Collective.

        The responses of an endpoint that has passed are handed out from here on. One that has not
        is out of use, what it has answered goes elsewhere, and it is brought back in mid-batch; if
        nobody has passed, the version is published once more, with canaries first. Repairs wait for
        its end, as for a whole sync: it writes over the files that they would push. ``meanwhile``
        has had its turn. Raises what ``publish`` raises then, and ``StopRequested`` while it waits
        for the canaries.
        """
        owing, self._owing = self._owing, {}
        if not owing:
            return published
        start_s = time.monotonic()
        delivery = Delivery(None)
        failed, expected, stopped_by = self.collectives.broadcast(
            self._end_canaries(owing, delivery)
        )
        if stopped_by:
            raise StopRequested(stopped_by)
        passed = {url: shown for url, shown in owing.items() if url not in failed}
        expected = expected and Expected.from_json(expected)
        self._delivery.foresee(delivery.shown)
        if self.thread.run(self.confirmed.settle(passed, failed, expected)):
            num_endpoints = float(len(self.confirmations))
            found = delivery.canary_metrics() | {"sync/endpoints": num_endpoints}
            return replace(published, metrics=_with_canaries(published.metrics, found))
        _, found = self._bring(published.served.version)
        found["time/sync_s"] = published.metrics["time/sync_s"] + time.monotonic() - start_s
        return replace(published, metrics={**published.metrics, **found})

    def close(self) -> None:
        """Ends repairs, leaves the broadcast, removes the weights from the shared folder."""
        if self._canaries is not None:
            self._canaries[1].cancel()
        self.thread.run(self.confirmed.end())
        if self._broadcaster is not None:
            self._broadcaster.close()
        self._store.close()

    # ---- the probe -----------------------------------------------------------------------------

    def _learn_probe(self, version: PolicyVersion) -> float:
        """Pushes visibly changed weights and sees the change; true weights have to follow.

        Once in this attempt of the run, and again if its files were damaged. Returns the seconds
        it took. Collective.
        """
        start_s, seconds = time.monotonic(), 0.0
        if self._reconciler.probe is not None and self._reconciler.probe_damaged:
            self._store.discard(self._reconciler.probe.weights)
            self._reconciler.probe, self._reconciler.probe_damaged = None, False
        while self.collectives.broadcast(self.config.probe and self._reconciler.probe is None):
            with self._delivery.perturbed():
                delivery = self._delivery.deliver(f"{version}{PROBE}", canary=True)
            if self._delivery.is_written_again(delivery):
                continue
            true = self._delivery.ask_trainer({url: s.samples for url, s in delivery.shown.items()})
            problems: dict[str, str] = {}
            for url, shown in delivery.shown.items():
                assert delivery.target is not None and shown.expected is not None
                probe = Probe(delivery.target, shown.expected, true[url])
                prover = self._prover
                if problem := probe.check(shown.samples, prover.tolerance, prover.limit):
                    problems[url] = problem
                else:
                    self._reconciler.probe = probe
                    prover.probe_shifts[url] = probe.visible(shown.samples)
            self._delivery.exclude(self.collectives.broadcast(problems))
            if self._reconciler.probe is None:
                self._store.discard(delivery.target)
            seconds = time.monotonic() - start_s
        return seconds

    # ---- delivery ------------------------------------------------------------------------------

    def _bring(
        self,
        version: PolicyVersion,
        meanwhile: Callable[[], object] = lambda: None,
        *,
        canary_follows: bool = False,
    ) -> tuple[Target, dict[str, float]]:
        """Has ``version`` served and confirmed, the canaries that follow begun. Collective."""
        probe_s = 0.0
        self._delivery.begin_version()
        while True:
            probe_s += self._learn_probe(version)
            delivery = self._delivery.deliver(
                str(version),
                canary=self.config.canary,
                canary_follows=canary_follows,
                meanwhile=meanwhile,
            )
            if not self._delivery.is_written_again(delivery):
                break
        shown = {
            url: delivery.shown.get(url, Shown(owes_canary=url in delivery.owing))
            for url in delivery.passed
        }
        self._owing = {url: shown[url] for url in delivery.owing}
        self._delivery.foresee(shown)
        metrics = delivery.metrics()  # before canaries that follow change what was shown
        metrics["time/probe_s"] += probe_s
        mine = delivery.target
        if mine is not None:  # of those that owe their canary nothing is expected yet
            expected = (s.expected for s in shown.values() if s.expected is not None)
            mine.expected = next(expected, None)
            self.thread.run(self.confirmed.confirm(mine, shown))
            self._begin_canaries(mine)
        # What every rank needs to have endpoints prove the version later. No other rank sends
        # requests before it: a server would make them before the canary's.
        record = self.collectives.broadcast(None if mine is None else mine.to_json())
        target = mine or Target.from_json(record)
        if mine is None:
            self.thread.run(self.confirmed.confirm(target, shown))
        before, self._current = self._current, mine
        if before is not None and before.name != target.name:
            self._store.discard(before)  # it has been served until here
        return target, metrics

    # ---- canaries that follow ------------------------------------------------------------------

    def _begin_canaries(self, target: Target) -> None:
        """Of those that owe theirs; on rank 0."""
        if not self._owing:
            return
        endpoints = [e for e in self.pool.endpoints if e.url in self._owing]
        fan_out = FanOut(self._reconciler, endpoints, target, canary=True, owing=self._owing)
        running = self.thread.submit(fan_out.run())
        running.add_done_callback(lambda _: self.thread.loop.call_soon_threadsafe(fan_out.ended))
        self._canaries = fan_out, running

    def _end_canaries(
        self, owing: Collection[str], delivery: Delivery
    ) -> tuple[dict[str, str], list[list[list[float]]] | None, str]:
        """Waits for them; those that have passed are in ``delivery``. Collective.

        On rank 0: by URL, why the others of ``owing`` have not; what the trainer says of their
        samples; why the run is to stop, if it is.
        """
        fan_out, running = self._canaries or (None, None)
        errors: dict[str, EndpointError] = {}
        stopped_by = ""
        with self.stop.wakes(lambda _: None if running is None else running.cancel()):
            self._delivery.answer_questions(fan_out, delivery, canary=True)
            try:
                if running is not None:
                    delivery.shown, errors = split_outcomes(running.result())
            except CancelledError:
                if self.stop.error is None:
                    raise
                stopped_by = str(self.stop.error)
        self._canaries = None
        failed = {
            url: "was removed before its canary" for url in owing if url not in delivery.shown
        }
        failed |= {url: error.reason for url, error in errors.items()}
        expected = next((shown.expected for shown in delivery.shown.values()), None)
        return failed, None if expected is None else expected.to_json(), stopped_by

    # ---- the pool, which belongs to the producer's loop ----------------------------------------

    def _withdraw(self) -> None:
        """No endpoint serves a known version from here on; what rank 0 excluded, all exclude."""
        self.thread.run(self.confirmed.withdraw())
        excluded = {e.url: e.excluded for e in self.pool.endpoints if e.excluded is not None}
        self._delivery.exclude(self.collectives.broadcast(excluded))

    def _refuse_late_doubts(self, version: PolicyVersion) -> None:
        """The batch that was trained must not have responses of an endpoint that failed since.

        No proof of it can fail any more. It is in no checkpoint and not certified, and the journal
        has what was withdrawn: a resumed run makes it again. Raises ``InterruptedRun``. Collective.
        """
        told = self.collectives.all_gather(list(self.confirmed.end_batch().items()))
        if doubts := [f"{url} (since its proof number {n})" for rank in told for url, n in rank]:
            raise InterruptedRun(
                f"batch {version.v - 1} was trained when an endpoint that had made responses for "
                f"it failed its proof: {', '.join(doubts)}; it is neither certified nor in a "
                "checkpoint: go on with --resume, which makes it again"
            )


def _with_canaries(metrics: Mapping[str, float], found: Mapping[str, float]) -> dict[str, float]:
    """``metrics`` of a version, with what was ``found`` by canaries that came behind its others."""
    merged = {**metrics, **found}
    for name in ("sync/canary_mean", "sync/canary_max"):
        if name in metrics and name in found:
            merged[name] = max(metrics[name], found[name])
    merged["time/canary_s"] = metrics["time/canary_s"] + found["time/canary_s"]
    return merged
