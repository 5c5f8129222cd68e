"""Reconciliation: the one coroutine that brings an endpoint to a version and has it prove it.

    pause → stamp "updating" → push → prove the bits → resume → canary → stamp the version
                                                             or → stamp the version, then canary

No token is made of bits that are not proved, where bits are proved at all and were not broadcast:
the endpoint holds its trainer to that, however it is left (``OwedProof``). What fails is taken out
of use (*quarantine*), pushed again, proved again, then excluded, unless this host's copy of the
weights turns out to be damaged: that is to be written again first. One that still has the weights
(it was only away, or a broadcast brought them) is not pushed to, it proves them. The stamp of the
version comes last, so no other process takes for served what has not been proved.

The canary of an endpoint that has proved its bits, and passed canaries before, may follow the stamp
and run beside the first requests; their responses are held back in every process until it has
passed (``Fleet.confirm``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from easyrl.inference_client.errors import EndpointError, EndpointUnavailable, NotAnswered
from easyrl.inference_client.pool.endpoint_pool import Endpoint, EndpointPool
from easyrl.weight_sync.broadcasting import BroadcastFailed, TensorTee
from easyrl.weight_sync.canary import Expect
from easyrl.weight_sync.proof import Probe, ProofFailed, Prover, Shown
from easyrl.weight_sync.push import GIVING_UP_S, WeightPusher, still_answers, together, while_up
from easyrl.weight_sync.target import Target

logger = logging.getLogger(__name__)

PUSH_ATTEMPTS = 2
MOST_LATE = 3  # times that others wait in vain for an endpoint that is in time in between


class DamagedCopy(EndpointUnavailable):
    """An endpoint failed, and what it was given is not what was written: it is not to blame."""


@dataclass
class Reconciler:
    """Brings endpoints to a version, each on its own. On rank 0, in the pool's loop.

    Attributes:
        timeout_s: of answers that one endpoint owes in all while it is brought to a version: who
            has let so much pass is not pushed to again, and others that are ready wait no longer.
        probe: once learned, shown by whoever is new or has restarted.
        probe_damaged: its weights on this host are not what was written; nobody can show it, until
            another is learned.
        on_failed_proof: told of one that showed other weights than it was given, once it is out of
            use and its requests in flight go elsewhere.
    """

    pool: EndpointPool
    pusher: WeightPusher
    prover: Prover
    timeout_s: float = 600.0
    probe: Probe | None = None
    probe_damaged: bool = False
    on_failed_proof: Callable[[Endpoint], object] = lambda endpoint: None

    def __post_init__(self) -> None:
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by URL
        self._canary_first: set[str] = set()  # URLs that have failed a canary that followed
        self._late: set[str] = set()  # URLs; see ``waited_for``
        self._num_late: Counter[str] = Counter()  # by URL

    def waited_for(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        """Those that a version is brought to before a batch begins, of ``endpoints``, all up.

        Without those that were late and have not been in time since, if that leaves any; late for
        the ``MOST_LATE``th time, an endpoint stays so. They are brought to it in mid-batch.
        """
        return [e for e in endpoints if e.url not in self._late] or list(endpoints)

    def late(self, endpoint: Endpoint, version: str) -> None:
        """Others have waited for ``endpoint`` in vain: it is set aside, its repair follows."""
        if endpoint.url not in self._late:
            self._late.add(endpoint.url)
            self._num_late[endpoint.url] += 1
        reason = (
            f"is late: the others, ready for version {version}, waited {self.timeout_s:g} s for "
            "its answers (weight_sync.timeout_s); it is brought to it in mid-batch"
        )
        self.pool.set_aside(endpoint, EndpointUnavailable(endpoint.url, reason))

    async def reconcile(
        self,
        endpoint: Endpoint,
        weights: Target,
        expect: Expect | None,
        on_sampling: Callable[[], object] = lambda: None,
        *,
        canary_follows: bool = False,
    ) -> Shown:
        """Has ``endpoint`` serve ``weights``, proved, under their version.

        ``on_sampling`` is told when it has proved their bits and makes the canary's samples. With
        ``canary_follows`` it may yet owe the canary (``Shown.owes_canary``), for ``compare``.
        Consumes: their chunks. Waits for: an earlier call for this endpoint to give up, the
        endpoint, what ``expect`` waits for. Is unblocked by: answers, the pool finding it down, a
        cancellation. Raises ``EndpointUnavailable`` if it is gone, ``DamagedCopy``, ``ProofFailed``
        when it failed for good; then, and after a cancellation, it serves under no version that
        requests ask for, unless it still serves the one before, untouched. It goes on under that;
        paused stays one that does not answer, and with a ``DamagedCopy`` while that is being
        published, until the next push, or ``end``.
        """
        start_s = time.monotonic()
        bringing = self._until_proved(endpoint, weights, expect, on_sampling, canary_follows)
        shown = await while_up(endpoint, bringing)
        in_time = time.monotonic() - start_s < self.timeout_s
        if in_time and self._num_late[endpoint.url] < MOST_LATE:
            self._late.discard(endpoint.url)
        return shown

    async def compare(
        self,
        endpoint: Endpoint,
        weights: Target,
        expect: Expect,
        shown: Shown,
        on_sampling: Callable[[], object] = lambda: None,
    ) -> Shown:
        """The canary that ``endpoint``, which serves ``weights``, owes; into ``shown``.

        Waits for and is unblocked by: as ``reconcile``. Raises ``EndpointUnavailable`` if it has
        not passed, for whatever reason: its requests, answered or in flight, go elsewhere, and it
        has to prove itself anew; if its log-probabilities were wrong, canaries come first from then
        on.
        """

        async def compare_samples() -> None:
            async with self._locks[endpoint.url]:
                on_sampling()
                with self._span(endpoint, "canary"):
                    await together(
                        self.pusher.check_start(endpoint),
                        self.prover.compare_samples(endpoint, weights.version, expect, shown),
                    )

        try:
            await while_up(endpoint, compare_samples())
            return shown
        except EndpointError as error:
            self.pool.quarantine(endpoint, error.reason)
            if isinstance(error, EndpointUnavailable) and not await still_answers(endpoint):
                self.prover.was_away(endpoint.url)
                raise
            logger.warning("weight sync: %s", error)
            if isinstance(error, ProofFailed):
                self._canary_first.add(endpoint.url)
            async with self._locks[endpoint.url]:
                await self._quarantine(endpoint, weights, error)
            raise EndpointUnavailable(endpoint.url, error.reason) from error

    async def end(self) -> None:
        """No endpoint that was pushed to stays paused, as far as it answers.

        Waits for what was cancelled before to give up.
        """

        async def given_up(lock: asyncio.Lock) -> None:
            async with lock:
                pass

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * GIVING_UP_S):
                await asyncio.gather(*map(given_up, self._locks.values()))
                await asyncio.gather(*map(self.pusher.let_go, self.pusher.paused))

    async def broadcast(
        self, endpoints: Sequence[Endpoint], weights: Target, tee: TensorTee
    ) -> int:
        """Brings ``weights`` to all that have shown the probe's change at once, or to none.

        They have yet to prove them. Returns how many were reached.
        """
        ready: list[Endpoint] = []

        async def show(endpoint: Endpoint) -> None:
            with contextlib.suppress(EndpointError):  # will be seen again when it is pushed to
                await while_up(endpoint, self._show_probe(endpoint, Shown()))
                ready.append(endpoint)

        async with contextlib.AsyncExitStack() as held:
            for endpoint in endpoints:
                await held.enter_async_context(self._locks[endpoint.url])
            try:
                await asyncio.gather(*map(show, endpoints))
                if ready:
                    await self.pusher.push_together(ready, weights, tee)
            except (BroadcastFailed, EndpointError) as error:
                logger.warning(
                    "weight sync: the broadcast of %s failed, it goes by artefact: %s",
                    weights.version,
                    error,
                )
                ready = []
            finally:
                tee.close()
        if ready:
            await weights.completed()  # the proof reads the host's copy
        return len(ready)

    async def _until_proved(
        self,
        endpoint: Endpoint,
        weights: Target,
        expect: Expect | None,
        on_sampling: Callable[[], object],
        canary_follows: bool,
    ) -> Shown:
        async with self._locks[endpoint.url]:
            try:
                return await self._push_and_prove(
                    endpoint, weights, expect, on_sampling, canary_follows
                )
            except EndpointUnavailable as error:
                # It does not answer, or its weights are written again at once: the next push.
                if isinstance(error, DamagedCopy) and weights.is_published:
                    await self.pusher.let_go(endpoint)
                raise
            except BaseException:  # what other ranks have sent it must end
                await self.pusher.let_go(endpoint)
                raise

    async def _push_and_prove(
        self,
        endpoint: Endpoint,
        weights: Target,
        expect: Expect | None,
        on_sampling: Callable[[], object],
        canary_follows: bool,
    ) -> Shown:
        """As ``reconcile``, but leaves an endpoint paused that fails between push and resume."""
        shown = Shown()
        pushes_left, waited_s = PUSH_ATTEMPTS, 0.0
        while True:
            try:
                stamp = await self.pusher.stamp_of(endpoint, weights)
                if stamp is None:
                    pushes_left -= 1
                    await self._show_probe(endpoint, shown)
                    with self._span(endpoint, "push"):
                        await self.pusher.push(endpoint, weights)
                    stamp = weights.unproven_stamp
                with self._span(endpoint, "proof"):
                    await self.prover.prove_bits(endpoint, weights, stamp, shown)
                if stamp != weights.version:
                    await self.pusher.resume(endpoint, shown.base or shown.proof)
                else:  # whoever has paused it, and may be dead
                    await endpoint.client.resume()
                shown.owes_canary = canary_follows and self._may_owe_canary(endpoint)
                if expect is not None and not shown.owes_canary:
                    on_sampling()
                    with self._span(endpoint, "canary"):
                        await self.prover.compare_samples(endpoint, stamp, expect, shown)
                if stamp != weights.version:
                    await self.pusher.stamp(endpoint, weights.version)
                    if self.prover.reads_bits and not shown.owes_canary:
                        await self.pusher.check_start(endpoint)
                return shown
            except EndpointError as error:
                if isinstance(error, EndpointUnavailable) and not await still_answers(endpoint):
                    raise
                logger.warning("weight sync: %s", error)
                await self._quarantine(endpoint, weights, error)
                if isinstance(error, NotAnswered):
                    waited_s += error.waited_s
                damage = await self._damage(weights)
                if damage is not None:
                    raise DamagedCopy(endpoint.url, damage) from error
                if not pushes_left or waited_s >= self.timeout_s:
                    raise ProofFailed(endpoint.url, error.reason) from error

    def _may_owe_canary(self, endpoint: Endpoint) -> bool:
        """Whether it may be sent requests before its canary: its bits are right, as before."""
        has_passed = self.prover.reads_bits and self.prover.has_passed(endpoint.url)
        return has_passed and endpoint.url not in self._canary_first

    async def _damage(self, weights: Target) -> str | None:
        """What is wrong with this host's copy of ``weights``, or of the probe's."""
        if self.probe is not None and (damage := await self.probe.weights.damage()) is not None:
            self.probe_damaged = True
            return damage
        return await weights.damage()

    async def _quarantine(self, endpoint: Endpoint, weights: Target, error: EndpointError) -> None:
        """It gets no request, and what it has in flight goes elsewhere, until it is confirmed."""
        self.prover.forget(endpoint.url)
        self.pool.quarantine(endpoint, error.reason)
        if isinstance(error, ProofFailed):
            self.on_failed_proof(endpoint)
        await self.pusher.disown(endpoint, weights)

    async def _show_probe(self, endpoint: Endpoint, shown: Shown) -> None:
        """Makes an endpoint that is new or has restarted show the probe's change.

        The true weights follow, and their canary: what it forgot to forget shows in either.
        """
        if await self.pusher.has_restarted(endpoint):
            self.prover.forget(endpoint.url)
        probe = self.probe
        if probe is None or endpoint.url in self.prover.probe_shifts:
            return
        start_s = time.monotonic()
        await self.pusher.push(endpoint, probe.weights)
        stamp = probe.weights.unproven_stamp
        proved = Shown()
        await self.prover.prove_bits(endpoint, probe.weights, stamp, proved)
        await self.pusher.resume(endpoint, proved.base or proved.proof)
        samples = await self.prover.sample(endpoint, stamp)
        if problem := probe.check(samples, self.prover.tolerance, self.prover.limit):
            raise ProofFailed(endpoint.url, problem)
        self.prover.probe_shifts[endpoint.url] = probe.visible(samples)
        now_s = time.monotonic()
        self.pool.span(endpoint.url, "probe", start_s, now_s)
        shown.probe_s += now_s - start_s

    @contextlib.contextmanager
    def _span(self, endpoint: Endpoint, name: str) -> Iterator[None]:
        """For the timeline; also where it fails."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.pool.span(endpoint.url, name, start_s, time.monotonic())
