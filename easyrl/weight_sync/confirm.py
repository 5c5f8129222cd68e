"""Who has confirmed the target; endpoints that return or join in mid-batch are brought to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from easyrl.inference_client.errors import EndpointError, EndpointUnavailable
from easyrl.inference_client.pool.endpoint_pool import Endpoint, EndpointPool
from easyrl.schema import Confirmation, other_run
from easyrl.weight_sync.canary import Expect, Expected
from easyrl.weight_sync.proof import ProofFailed, Prover, Shown
from easyrl.weight_sync.push import ANSWER_TIMEOUT_S, while_up
from easyrl.weight_sync.reconcile import Reconciler
from easyrl.weight_sync.target import Target

RETRY_INTERVAL_S = 1.0  # between questions whether rank 0 has repaired an endpoint


@dataclass
class ConfirmedEndpoints:
    """Keeps endpoints at the published version until the next. In the pool's loop.

    Attributes:
        reconciler: of rank 0, which has the weights. Other ranks wait until the endpoint stamps the
            version, as it does once rank 0 has seen its proof, and have it prove itself to them
            too.
        patience_s: how long another rank waits for rank 0.
        on_failed_proof: told when an endpoint that had served in this batch fails a proof, once it
            is out of use and its requests in flight go elsewhere: its URL and the number of its
            last good proof (``Endpoint.proof``). What this process got from it under that number,
            in this batch, is in doubt; under numbers before it, the good proof vouches for it.
            Another rank's numbers are its own: for it, all that came from that URL is.
        end_batch: the weights are about to move; gives what was told and has not been withdrawn, by
            URL.
    """

    pool: EndpointPool
    prover: Prover
    reconciler: Reconciler | None
    patience_s: float
    on_failed_proof: Callable[[str, int], object] = lambda url, proof: None
    end_batch: Callable[[], Mapping[str, int]] = dict

    def __post_init__(self) -> None:
        if self.reconciler is not None:
            self.reconciler.on_failed_proof = self._proof_failed
        self._target: Target | None = None  # None while the weights move
        self._settled = asyncio.Event()  # they do not move
        self._work: set[asyncio.Future[Shown]] = set()  # under way for the target
        self._confirmations: dict[str, Confirmation] = {}  # of the target, by URL
        # that owe the target's canary; also those that the pool has forgotten since
        self._owing: list[Endpoint] = []
        self._told: dict[str, int] = {}  # by URL, the last good proof of the last failure told of

    @property
    def confirmations(self) -> tuple[Confirmation, ...]:
        """Of every endpoint that has proved the target, by URL."""
        return tuple(confirmation for _, confirmation in sorted(self._confirmations.items()))

    async def withdraw(self) -> None:
        """The weights are about to move: no endpoint serves a known version."""
        self._target = None
        self._settled.clear()
        for work in self._work:
            work.cancel()
        for endpoint in self.pool.endpoints:
            if endpoint.confirmed_version is None:  # it was not brought back in time
                self.prover.was_away(endpoint.url)
        self.pool.withdraw_confirmations()

    async def confirm(self, target: Target, shown: Mapping[str, Shown]) -> None:
        """``target`` is published; the URLs of ``shown`` have proved it.

        Those that owe their canary get requests, and have not confirmed it before ``settle``.
        """
        self._target = target
        target.published()
        self._told = {}
        owing = {url for url, s in shown.items() if s.owes_canary}
        self._owing = []
        self._confirmations = {
            url: self._confirmation(url, s) for url, s in shown.items() if url not in owing
        }
        for endpoint in self.pool.endpoints:
            if endpoint.url in shown and endpoint.excluded is None and not endpoint.leaving:
                self.pool.adapters.learn(endpoint.url, target.model)
                self.pool.confirm(endpoint, target.version, cleared=endpoint.url not in owing)
                if endpoint.url in owing:
                    self._owing.append(endpoint)
        if not owing:
            self._settled.set()

    async def settle(
        self, shown: Mapping[str, Shown], failed: Mapping[str, str], expected: Expected | None
    ) -> bool:
        """Of those that owed it, the URLs of ``shown`` have passed their canary, ``failed`` not.

        ``failed``: by URL, why; what they have answered was held back and goes elsewhere.
        ``expected``: of the canary, for endpoints that return. Whether anyone has confirmed the
        target; where nobody has it has to be published again.
        """
        assert self._target is not None
        self._target.expected = self._target.expected or expected
        self._confirmations |= {url: self._confirmation(url, s) for url, s in shown.items()}
        owing, self._owing = self._owing, []
        for endpoint in owing:
            if endpoint.url in shown:
                self.pool.clear(endpoint)
            else:
                self.pool.quarantine(endpoint, failed[endpoint.url])
        if self._confirmations:
            self._settled.set()
        return bool(self._confirmations)

    async def end(self) -> None:
        """Nothing is served any more, and no endpoint stays paused, as far as they answer."""
        await self.withdraw()
        self._settled.set()
        if self.reconciler is not None:
            await self.reconciler.end()

    async def repair(self, endpoint: Endpoint) -> None:
        """Brings an endpoint that was down, or is new, to the target; waits while the weights move.

        It proves what every endpoint proves, without the trainer: against what the trainer said of
        the others' samples. Raises ``EndpointUnavailable`` if it is gone again, another
        ``EndpointError`` if it failed.
        """
        while True:
            await self._settled.wait()
            target = self._target
            if target is None or endpoint.confirmed_version == target.version:
                return  # ended, or confirmed meanwhile
            work = asyncio.ensure_future(self._bring(endpoint, target))
            self._work.add(work)
            try:
                await asyncio.wait([work])
            finally:
                work.cancel()
                self._work.discard(work)
            if self._target is not target:
                _ = work.cancelled() or work.exception()  # is no news by now
                continue
            url = endpoint.url
            self._confirmations[url] = self._confirmation(url, work.result())
            self.pool.confirm(endpoint, target.version)

    async def _bring(self, endpoint: Endpoint, target: Target) -> Shown:
        expect = None if target.expected is None else target.known
        if self.reconciler is not None:
            return await self.reconciler.reconcile(endpoint, target, expect)
        self.pool.adapters.learn(endpoint.url, target.model)
        return await while_up(endpoint, self._until_proved(endpoint, target, expect))

    async def _until_proved(
        self, endpoint: Endpoint, target: Target, expect: Expect | None
    ) -> Shown:
        """Waits for rank 0's push and for the proof, which rank 0 may have to push for twice."""
        deadline_s = time.monotonic() + self.patience_s
        while True:
            try:
                version = await endpoint.client.weight_version(ANSWER_TIMEOUT_S)
                if version == target.version:
                    shown = Shown()
                    await self.prover.prove_bits(endpoint, target, version, shown)
                    if expect is not None:
                        await self.prover.compare_samples(endpoint, version, expect, shown)
                    return shown
            except EndpointError as error:
                version = error.reason
                if isinstance(error, ProofFailed):
                    self.pool.quarantine(endpoint, error.reason)
                    self._proof_failed(endpoint)
            if time.monotonic() >= deadline_s:
                reason = f"shows {version}, not {target.version}, {self.patience_s:g} s later"
                reason += other_run(target.version, version)
                raise EndpointUnavailable(endpoint.url, reason)
            await asyncio.sleep(RETRY_INTERVAL_S)

    def _proof_failed(self, endpoint: Endpoint) -> None:
        """Tells it once for each good proof, of one that had served in this batch."""
        url, proof = endpoint.url, endpoint.proof
        served = self._target is not None and url in self._confirmations
        if served and self._told.get(url) != proof:
            self._told[url] = proof
            self.on_failed_proof(url, proof)

    def _confirmation(self, url: str, shown: Shown) -> Confirmation:
        assert self._target is not None
        mean = None if shown.reading is None else shown.reading.mean
        proved = self.prover.reads_bits
        return Confirmation(url, self._target.version, proved, mean, shown.proof, shown.base)
