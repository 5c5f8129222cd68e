"""Publishing: once per batch a version goes to every endpoint, and each proves it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace

from easyrl.config import WeightSyncConfig
from easyrl.engines.base import TrainEngine
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.errors import (
    EndpointError,
    EndpointUnavailable,
    NoEndpointError,
    Outage,
)
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.inference_client.transfer.artifact import weights_digest
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import (
    Completion,
    Confirmation,
    InterruptedRun,
    MicroBatch,
    NoEndpointServes,
    PolicyVersion,
    Published,
    ServedWeights,
    StopRequested,
)
from easyrl.weight_sync.broadcasting import Broadcaster, OpenGroup, device_broadcast
from easyrl.weight_sync.canary import Canary, Expected
from easyrl.weight_sync.confirm import ConfirmedEndpoints
from easyrl.weight_sync.delivery import Delivery, FanOut
from easyrl.weight_sync.proof import Probe, Prover, Shown
from easyrl.weight_sync.push import WeightPusher
from easyrl.weight_sync.reconcile import DamagedCopy, Reconciler
from easyrl.weight_sync.store import WeightStore
from easyrl.weight_sync.target import Target

logger = logging.getLogger(__name__)

MOST_WRITES = 3  # while one version is published, if what was written is damaged each time

RAISED_EVERYWHERE: dict[str, type[Exception]] = {
    "StopRequested": StopRequested,
    "Outage": Outage,
    "NoEndpointError": NoEndpointServes,  # all are excluded
}


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

    def __post_init__(self) -> None:
        config = self.config
        self._prover = Prover(self.canary, self.tolerance, reads_bits=config.prove)
        self._num_damaged = 0  # copies, while the present version is published
        self._broadcaster: Broadcaster | None = None
        if config.transport in ("nccl", "hccl"):
            open_group = self.open_group or device_broadcast(config, self.api_keys)
            self._broadcaster = Broadcaster(open_group, config.timeout_s)
        # used on rank 0 only, as are the next two
        self._store = WeightStore(config, self.run_name)
        pusher = WeightPusher(self._store, self._broadcaster, proof_follows=config.prove)
        self._reconciler = Reconciler(self.pool, pusher, self._prover, config.timeout_s)
        self._current: Target | None = None  # stays on the host until the next is served
        self._foreseen: Sequence[Completion] = ()  # canary samples of the version before
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
        target, metrics = self._bring(version, meanwhile, canary_follows=canary_follows)
        metrics["time/sync_s"] = time.monotonic() - start_s
        return Published(ServedWeights(version, weights_digest(target.chunks)), metrics)

    def settle(self, published: Published) -> Published:
        """Waits for the canaries that follow; ``published`` with their figures. Collective.

        The responses of an endpoint that has passed are handed out from here on. One that has not
        is out of use, what it has answered goes elsewhere, and it is brought back in mid-batch; if
        nobody has passed, the version is published once more, with canaries first. Raises what
        ``publish`` raises then.
        """
        owing, self._owing = self._owing, {}
        if not owing:
            return published
        delivery = Delivery(None)
        errors: dict[str, EndpointError] = {}
        fan_out, running = self._canaries or (None, None)
        self._answer_questions(fan_out, delivery, canary=True)
        if running is not None:
            delivery.shown, errors = _split(running.result())
        self._canaries = None
        failed = {url: error.reason for url, error in errors.items()}
        expected = next((shown.expected for shown in delivery.shown.values()), None)
        failed, said = self.collectives.broadcast([failed, expected and expected.to_json()])
        passed = {url: shown for url, shown in owing.items() if url not in failed}
        expected = said and Expected.from_json(said)
        self._foresee(delivery.shown)
        if self.thread.run(self.confirmed.settle(passed, failed, expected)):
            metrics = delivery.canary_metrics() | {"sync/endpoints": float(len(self.confirmations))}
        else:
            _, metrics = self._bring(published.served.version)
        return replace(published, metrics={**published.metrics, **metrics})

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
            with self.engine.perturbed_weights():
                delivery = self._deliver(f"{version}:probe", canary=True)
            if self._is_written_again(delivery):
                continue
            true = self._ask_trainer({url: s.samples for url, s in delivery.shown.items()})
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
            self._exclude(self.collectives.broadcast(problems))
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
        self._num_damaged, probe_s = 0, 0.0
        while True:
            probe_s += self._learn_probe(version)
            delivery = self._deliver(
                str(version),
                canary=self.config.canary,
                canary_follows=canary_follows,
                meanwhile=meanwhile,
            )
            if not self._is_written_again(delivery):
                break
        target = self._share(delivery)
        shown = {
            url: delivery.shown.get(url, Shown(owes_canary=url in delivery.owing))
            for url in delivery.passed
        }
        self.thread.run(self.confirmed.confirm(target, shown))
        before, self._current = self._current, delivery.target
        if before is not None and before.name != target.name:
            self._store.discard(before)  # it has been served until here
        self._foresee(shown)
        self._owing = {url: shown[url] for url in delivery.owing}
        if self._owing and delivery.target is not None:
            endpoints = [e for e in self.pool.endpoints if e.url in self._owing]
            fan_out = FanOut(self._reconciler, endpoints, target, canary=True, owing=self._owing)
            self._canaries = fan_out, self.thread.submit(fan_out.run())
        metrics = delivery.metrics()
        metrics["time/probe_s"] += probe_s
        return target, metrics

    def _foresee(self, shown: Mapping[str, Shown]) -> None:
        self._foreseen = next((s.samples for s in shown.values() if s.samples), self._foreseen)

    def _deliver(
        self,
        version: str,
        *,
        canary: bool,
        canary_follows: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Delivery:
        """Writes the weights and brings them to every live endpoint until at least one has passed.

        Or until one has not because of a damaged copy. The first push goes on while the weights are
        gathered and written. Collective.
        """
        is_first = self.collectives.ranks.rank == 0
        delivery = Delivery(self._store.begin(version) if is_first else None)
        is_written = False
        deadline_s = time.monotonic() + self.max_outage_s
        while not delivery.passed and delivery.damage is None:
            urls = self._live_urls(deadline_s)
            excluded: dict[str, str] = {}
            if delivery.target is not None:
                excluded = self._fan_out(
                    urls,
                    delivery,
                    canary,
                    canary_follows=canary_follows,
                    write=not is_written,
                    meanwhile=meanwhile,
                )
            else:
                if not is_written:
                    for _ in self.engine.named_weights():
                        pass
                    meanwhile()
                self._answer_questions(None, delivery, canary)
            is_written = True
            owing = [url for url, shown in delivery.shown.items() if shown.owes_canary]
            agreed = self.collectives.broadcast(
                [list(delivery.shown), owing, excluded, delivery.damage]
            )
            delivery.passed, delivery.owing, excluded, delivery.damage = agreed
            self._exclude(excluded)
        return delivery

    def _is_written_again(self, delivery: Delivery) -> bool:
        """Whether ``delivery`` met a damaged copy and has to be repeated, on every rank the same.

        If that does not help, those that passed are used. Raises ``Outage`` if there is none.
        """
        if delivery.damage is None:
            return False
        self._num_damaged += 1
        if self._num_damaged < MOST_WRITES:
            logger.warning("weight sync: the weights are written again: %s", delivery.damage)
            return True
        if delivery.passed:
            return False
        raise Outage(
            f"the weights were damaged on the trainer's host, {MOST_WRITES} times in a row: "
            f"{delivery.damage}; see what else writes into weight_sync.directory"
        )

    def _live_urls(self, deadline_s: float) -> list[str]:
        """Endpoints that are up, on every rank the same, as soon as there is one.

        Rank 0's reasons to stop are raised on every rank.
        """
        urls: list[str] = []
        stopped_by, reason = "", ""
        if self.collectives.ranks.rank == 0:
            limit_s = max(deadline_s - time.monotonic(), 0.0)
            waiting = self.thread.submit(self.pool.until_live(limit_s))
            try:
                with self.stop.wakes(lambda _: waiting.cancel()):
                    urls = [endpoint.url for endpoint in waiting.result()]
            except (CancelledError, NoEndpointError) as error:
                ended = self.stop.error if isinstance(error, CancelledError) else error
                if ended is None:
                    raise
                stopped_by, reason = type(ended).__name__, str(ended)
        urls, stopped_by, reason = self.collectives.broadcast([urls, stopped_by, reason])
        if stopped_by:
            raise RAISED_EVERYWHERE[stopped_by](reason)
        return urls

    def _fan_out(
        self,
        urls: Sequence[str],
        delivery: Delivery,
        canary: bool,
        *,
        canary_follows: bool,
        write: bool,
        meanwhile: Callable[[], object],
    ) -> dict[str, str]:
        """Has ``urls`` reconciled, while the weights are written if ``write``. Rank 0.

        Returns who failed for good and why.
        """
        live = [endpoint for endpoint in self.pool.endpoints if endpoint.url in urls]
        endpoints = self._reconciler.waited_for(live)
        broadcaster, target = self._broadcaster, delivery.target
        assert target is not None
        tee = broadcaster.begin() if write and broadcaster is not None else None
        fan_out = FanOut(
            self._reconciler,
            endpoints,
            target,
            canary=canary,
            canary_follows=canary_follows,
            tee=tee,
        )
        running = self.thread.submit(fan_out.run())
        try:
            if write:
                named_weights = self.engine.named_weights()
                if tee is not None:
                    named_weights = tee.pass_on(named_weights)
                elif broadcaster is not None:
                    named_weights = broadcaster.note(named_weights)
                self._store.write(target, named_weights, self.thread.loop)
                meanwhile()
            self._answer_questions(fan_out, delivery, canary)
            outcomes = running.result()
        except BaseException:
            running.cancel()
            raise
        if broadcaster is not None:
            delivery.num_broadcast = (delivery.num_broadcast or 0) + fan_out.num_broadcast
        shown, errors = _split(outcomes)
        delivery.shown |= shown
        damages = (e.reason for e in errors.values() if isinstance(e, DamagedCopy))
        delivery.damage = next(damages, None)
        return {u: e.reason for u, e in errors.items() if not isinstance(e, EndpointUnavailable)}

    def _answer_questions(self, fan_out: FanOut | None, delivery: Delivery, canary: bool) -> None:
        """Asks the trainer what endpoints want to know, until all have ended. Collective.

        While they make samples, it is asked about those of the version before: seeds are the
        same and a step is small, so that most often the new weights give the same tokens.
        """
        foreseen: Expected | None = None
        foresees = bool(self._foreseen)
        if canary and foresees and fan_out is not None:
            foresees = self.thread.run(fan_out.sampling())
        if canary and self.collectives.broadcast(foresees):
            mine = {"": self._foreseen} if fan_out is not None else {}
            foreseen = next(iter(self._ask_trainer(mine).values()), None)
        while True:
            samples = {} if fan_out is None else self.thread.run(fan_out.questions())
            known = {url: foreseen for url, s in samples.items() if foreseen and foreseen.is_of(s)}
            asked = {url: s for url, s in samples.items() if url not in known}
            if fan_out is not None and known and not asked:
                self.thread.run(fan_out.answer(known))
                continue
            if not self.collectives.broadcast(bool(asked)):
                return
            start_s = time.monotonic()
            expected = self._ask_trainer(asked)
            if fan_out is not None:
                self.thread.run(fan_out.answer({**known, **expected}))
            delivery.asking_s += time.monotonic() - start_s

    def _ask_trainer(self, samples: Mapping[str, Sequence[Completion]]) -> dict[str, Expected]:
        return self.canary.ask_trainer(samples, self.engine, self.collectives, self.dummy)

    def _share(self, delivery: Delivery) -> Target:
        """What every rank needs to have endpoints prove the version later. Collective."""
        mine = delivery.target
        if mine is not None:
            mine.expected = next(iter(delivery.shown.values()), Shown()).expected
        record = self.collectives.broadcast(None if mine is None else mine.to_json())
        return mine or Target.from_json(record)

    # ---- the pool, which belongs to the producer's loop ----------------------------------------

    def _withdraw(self) -> None:
        """No endpoint serves a known version from here on; what rank 0 excluded, all exclude."""
        self.thread.run(self.confirmed.withdraw())
        excluded = {e.url: e.excluded for e in self.pool.endpoints if e.excluded is not None}
        self._exclude(self.collectives.broadcast(excluded))

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

    def _exclude(self, problems: Mapping[str, str]) -> None:
        """Excludes by URL; a pool may not know an endpoint yet, or no longer."""

        async def exclude() -> None:
            for endpoint in self.pool.endpoints:
                if endpoint.url in problems and endpoint.excluded is None:
                    self.pool.exclude(endpoint, problems[endpoint.url])

        if problems:
            self.thread.run(exclude())


def _split(
    outcomes: Mapping[str, Shown | EndpointError],
) -> tuple[dict[str, Shown], dict[str, EndpointError]]:
    """By URL, who has passed and who has not."""
    shown = {url: o for url, o in outcomes.items() if isinstance(o, Shown)}
    return shown, {url: o for url, o in outcomes.items() if isinstance(o, EndpointError)}
