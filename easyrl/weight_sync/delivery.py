"""Delivery: the weights are written and go to many endpoints; the trainer answers for them all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from easyrl.engines.base import TrainEngine
from easyrl.inference_client.errors import (
    EndpointError,
    EndpointUnavailable,
    NoEndpointError,
    Outage,
)
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.shared_cores import SharedCores
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import Completion, MicroBatch, NoEndpointServes, StopRequested
from easyrl.weight_sync.adapter import AdapterForm, write_base
from easyrl.weight_sync.broadcasting import Broadcaster, TensorTee
from easyrl.weight_sync.canary import Canary, Expected
from easyrl.weight_sync.fan_out import FanOut
from easyrl.weight_sync.proof import Shown
from easyrl.weight_sync.reconcile import DamagedCopy, Reconciler
from easyrl.weight_sync.shares import Shares
from easyrl.weight_sync.store import NamedWeights, WeightStore
from easyrl.weight_sync.target import Target

logger = logging.getLogger(__name__)

MOST_WRITES = 3  # while one version is published, if what was written is damaged each time

RAISED_EVERYWHERE: dict[str, type[Exception]] = {
    "StopRequested": StopRequested,
    "Outage": Outage,
    "NoEndpointError": NoEndpointServes,  # all are excluded
}


@dataclass(slots=True)
class Delivery:
    """How one version reached the endpoints: rank 0's, but all have lists and ``damage``."""

    target: Target | None
    passed: list[str] = field(default_factory=list)  # URLs
    owing: list[str] = field(default_factory=list)  # of them those that owe their canary
    damage: str | None = None  # of the copy on rank 0's host, which cost an endpoint the version
    shown: dict[str, Shown] = field(default_factory=dict)  # by URL, by those that passed
    num_broadcast: int | None = None  # endpoints that a broadcast reached; None: never asked for
    asking_s: float = 0.0  # seconds of the trainer's own forwards for the canary

    def metrics(self) -> dict[str, float]:
        """Seconds are those of the endpoint that took longest."""
        slowest = max(
            self.shown.values(), key=lambda s: s.probe_s + s.proof_s + s.canary_s, default=Shown()
        )
        found = {
            "time/probe_s": slowest.probe_s,
            "time/proof_s": slowest.proof_s,
            "sync/endpoints": float(len(self.passed)),
        }
        if self.target is not None:
            found["sync/bytes"] = float(sum(chunk.num_bytes for chunk in self.target.chunks))
        if self.num_broadcast is not None:
            found["sync/broadcast"] = float(self.num_broadcast)
        return found | self.canary_metrics()

    def canary_metrics(self) -> dict[str, float]:
        """Of those in ``shown`` that have passed it."""
        slowest_s = max((s.canary_s for s in self.shown.values()), default=0.0)
        found = {"time/canary_s": slowest_s + self.asking_s}
        if readings := [s.reading for s in self.shown.values() if s.reading is not None]:
            found["sync/canary_mean"] = max(reading.mean for reading in readings)
            found["sync/canary_max"] = max(reading.maximum for reading in readings)
        return found


@dataclass(kw_only=True)
class Deliverer:
    """Writes a version of the weights and brings it to every endpoint that is up.

    Methods are called by all ranks, of which the first has ``store``, ``reconciler`` and
    ``broadcaster`` at work; the trainer's answers to canaries are a collective of all.

    Attributes:
        stop: ends the waiting for an endpoint.
        max_outage_s: how long all endpoints may be down.
        broadcaster: of a transport that broadcasts.
        adapter: what is sent of a policy with adapters; None: the whole model.
    """

    engine: TrainEngine
    pool: EndpointPool
    thread: LoopThread
    collectives: Collectives
    canary: Canary
    dummy: Callable[[], MicroBatch]
    stop: StopRequest
    max_outage_s: float
    store: WeightStore
    reconciler: Reconciler
    broadcaster: Broadcaster | None
    cores: SharedCores
    shares: Shares | None = None  # of a model whose parts are written where they are
    adapter: AdapterForm | None = None

    def __post_init__(self) -> None:
        self._num_damaged = 0  # copies, while the present version is published
        self._foreseen: Sequence[Completion] = ()  # canary samples of the version before

    def begin_version(self) -> None:
        """Another version is going to be published: no copy of it has been damaged yet."""
        self._num_damaged = 0

    def foresee(self, shown: Mapping[str, Shown]) -> None:
        """The canary samples in ``shown`` are most often those of the next version, too."""
        self._foreseen = next((s.samples for s in shown.values() if s.samples), self._foreseen)

    def deliver(
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
        delivery = Delivery(self._begin(version) if is_first else None)
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
                    shares = self.shares
                    for _ in self._weights() if shares is None else shares.begin_shares({}):
                        pass
                    meanwhile()
                self.answer_questions(None, delivery, canary)
            is_written = True
            owing = [url for url, shown in delivery.shown.items() if shown.owes_canary]
            agreed = self.collectives.broadcast(
                [list(delivery.shown), owing, excluded, delivery.damage]
            )
            delivery.passed, delivery.owing, excluded, delivery.damage = agreed
            self.exclude(excluded)
        return delivery

    def perturbed(self) -> AbstractContextManager[None]:
        """Inside, what is sent is visibly changed. Collective."""
        if self.adapter is None:
            return self.engine.perturbed_weights()
        return self.engine.perturbed_weights("adapter")

    def _begin(self, version: str) -> Target:
        target = self.store.begin(version)
        return target if self.adapter is None else self.adapter.dress(target)

    def _weights(self) -> NamedWeights:
        """What is sent. Collective."""
        form = self.adapter
        return self.engine.named_weights() if form is None else form.weights(self.engine)

    def is_written_again(self, delivery: Delivery) -> bool:
        """Whether ``delivery`` met a damaged copy and has to be repeated, on every rank the same.

        If that does not help, those that passed are used. Raises ``Outage`` if there is none.
        """
        if delivery.damage is None:
            return False
        self._num_damaged += 1
        if self._num_damaged < MOST_WRITES:
            logger.warning("weight sync: the weights are written again: %s", delivery.damage)
            self._write_damaged_base()
            return True
        if delivery.passed:
            return False
        raise Outage(
            f"the weights were damaged on the trainer's host, {MOST_WRITES} times in a row: "
            f"{delivery.damage}; see what else writes into weight_sync.directory"
        )

    def _write_damaged_base(self) -> None:
        """Writes the model below the adapters again, if it is what was damaged. Collective."""
        form = self.adapter
        if form is None:
            return
        is_damaged = form.base is not None and self.thread.run(form.base.damage()) is not None
        if self.collectives.broadcast(is_damaged):
            self.store.discard(form.base)
            name = "" if form.base is None else form.base.version
            base = write_base(name, self.engine, self.store, self.thread, self.collectives)
            self.adapter = replace(form, base=base)

    def answer_questions(self, fan_out: FanOut | None, delivery: Delivery, canary: bool) -> None:
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
            foreseen = next(iter(self.ask_trainer(mine).values()), None)
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
            expected = self.ask_trainer(asked)
            if fan_out is not None:
                self.thread.run(fan_out.answer({**known, **expected}))
            delivery.asking_s += time.monotonic() - start_s

    def ask_trainer(self, samples: Mapping[str, Sequence[Completion]]) -> dict[str, Expected]:
        """What the trainer says of rank 0's canary ``samples``, by URL. Collective."""
        with self.cores.computing(others_begin=True):  # their samples, or the next batch
            return self.canary.ask_trainer(samples, self.engine, self.collectives, self.dummy)

    def exclude(self, problems: Mapping[str, str]) -> None:
        """Excludes by URL; a pool may not know an endpoint yet, or no longer."""

        async def exclude() -> None:
            for endpoint in self.pool.endpoints:
                if endpoint.url in problems and endpoint.excluded is None:
                    self.pool.exclude(endpoint, problems[endpoint.url])

        if problems:
            self.thread.run(exclude())

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
        endpoints = self.reconciler.waited_for(live)
        broadcaster, target = self.broadcaster, delivery.target
        if self.adapter is not None:  # too small to be worth a group of devices
            broadcaster = None
        assert target is not None
        tee = broadcaster.begin() if write and broadcaster is not None else None
        fan_out = FanOut(
            self.reconciler,
            endpoints,
            target,
            canary=canary,
            canary_follows=canary_follows,
            tee=tee,
        )
        running = self.thread.submit(fan_out.run())
        try:
            if write:
                self._write(target, tee)
                meanwhile()
            self.answer_questions(fan_out, delivery, canary)
            outcomes = running.result()
        except BaseException:
            running.cancel()
            raise
        if broadcaster is not None:
            delivery.num_broadcast = (delivery.num_broadcast or 0) + fan_out.num_broadcast
        shown, errors = split_outcomes(outcomes)
        delivery.shown |= shown
        damages = (e.reason for e in errors.values() if isinstance(e, DamagedCopy))
        delivery.damage = next(damages, None)
        return {u: e.reason for u, e in errors.items() if not isinstance(e, EndpointUnavailable)}

    def _write(self, target: Target, tee: TensorTee | None) -> None:
        """The weights as ``target``'s artefact, or past it to who takes them on the way."""
        if self.shares is not None:
            self.store.write_shares(target, self.shares, self.thread.loop)
            return
        named_weights = self._weights()
        if tee is not None:
            named_weights = tee.pass_on(named_weights)
        elif self.broadcaster is not None and self.adapter is None:
            named_weights = self.broadcaster.note(named_weights)
        self.store.write(target, named_weights, self.thread.loop)


def split_outcomes(
    outcomes: Mapping[str, Shown | EndpointError],
) -> tuple[dict[str, Shown], dict[str, EndpointError]]:
    """By URL, who has passed and who has not."""
    shown = {url: o for url, o in outcomes.items() if isinstance(o, Shown)}
    return shown, {url: o for url, o in outcomes.items() if isinstance(o, EndpointError)}
