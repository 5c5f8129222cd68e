"""What an endpoint has to show before a request of a version goes to it (docs/endpoints.md).

*Version and checksums* are the proof that a small step arrived: what is served, read back by each
of the endpoint's workers, has the artefact's hashes. The *canary* compares what the endpoint
samples with the trainer's log-probabilities. (For what neither sees there is the *probe*.)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from easyrl.inference_client.client import WorkerProof
from easyrl.inference_client.errors import EndpointError
from easyrl.inference_client.pool.endpoint_pool import Endpoint
from easyrl.schema import Completion
from easyrl.weight_sync.canary import Canary, CanaryReading, Expect, Expected
from easyrl.weight_sync.push import ANSWER_TIMEOUT_S
from easyrl.weight_sync.target import WeightStream


class ProofFailed(EndpointError):
    """An endpoint answered, and what it showed is not what it was given."""


class OtherVersionShown(ProofFailed):
    """It shows another version than it was given: it has restarted, or is given another one."""


def is_failed_proof(error: EndpointError) -> bool:
    """Whether an endpoint showed other weights under the version that it was given."""
    return isinstance(error, ProofFailed) and not isinstance(error, OtherVersionShown)


@dataclass(slots=True)
class Spans:
    """Seconds that an endpoint took to show what it serves."""

    probe_s: float = 0.0
    proof_s: float = 0.0  # version and checksums
    canary_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.probe_s + self.proof_s + self.canary_s


@dataclass(slots=True)
class Shown:
    """What an endpoint has shown of a version."""

    samples: Sequence[Completion] = ()
    expected: Expected | None = None  # of ``samples``; None: without a canary
    reading: CanaryReading | None = None
    spans: Spans = field(default_factory=Spans)


class Prover:
    """Has endpoints show what they serve. In the pool's loop.

    Args:
        tolerance: of the canary's mean |Δ log-prob|, nats.
        reads_bits: whether the hash of every served tensor is read back and compared.
    """

    def __init__(self, canary: Canary, *, tolerance: float, reads_bits: bool) -> None:
        self._canary = canary
        self.tolerance = tolerance
        self.reads_bits = reads_bits
        # Nats by which the probe moved each endpoint's samples, by URL: of those that have shown
        # it since they started; infinite once they have shown the true weights again.
        self._probe_shifts: dict[str, float] = {}

    async def prove(
        self,
        endpoint: Endpoint,
        weights: WeightStream,
        stamp: str,
        expect: Expect | None,
        spans: Spans,
    ) -> Shown:
        """Version, checksums and, if ``expect`` can tell what it should show, the canary.

        Raises ``ProofFailed``, ``EndpointError`` without an answer.
        """
        start_s = time.monotonic()
        await prove_weights(endpoint, weights, stamp=stamp, bits=self.reads_bits)
        spans.proof_s += time.monotonic() - start_s
        if expect is None:
            return Shown(spans=spans)
        start_s = time.monotonic()
        samples = await self.sample(endpoint, stamp)
        spans.canary_s += time.monotonic() - start_s
        expected = await expect(endpoint.url, samples)
        reading = expected.reading(samples)
        if problem := check_canary(reading, self._limit(endpoint.url)):
            raise ProofFailed(endpoint.url, problem)
        if endpoint.url in self._probe_shifts:
            self._probe_shifts[endpoint.url] = np.inf
        return Shown(samples, expected, reading, spans)

    async def sample(self, endpoint: Endpoint, stamp: str) -> list[Completion]:
        """The canary's samples. Raises ``ProofFailed`` if not all tokens carry ``stamp``."""
        samples = await self._canary.sample(endpoint.url)
        check_stamp(endpoint, samples, stamp)
        return samples

    # ---- the probe: who has shown its change since it started ----------------------------------

    def has_shown_probe(self, url: str) -> bool:
        return url in self._probe_shifts

    def trust(self, url: str, shift: float) -> None:
        """It has shown the probe's change, of ``shift`` nats."""
        self._probe_shifts[url] = shift

    def distrust(self, url: str) -> None:
        """It has to show the probe's change again."""
        self._probe_shifts.pop(url, None)

    def _limit(self, url: str) -> float:
        """Of its canary, nats.

        After the probe it has to come back much nearer than half-way: keys and values of the canary
        that were left from the probe's weights show, also where its change is below the tolerance.
        """
        return min(self.tolerance, self._probe_shifts.get(url, np.inf) / 2)


async def prove_weights(
    endpoint: Endpoint, weights: WeightStream, *, stamp: str, bits: bool
) -> None:
    """``stamp`` and, if ``bits`` are asked for, the checksum of every tensor in every worker.

    Raises ``ProofFailed`` naming the first wrong tensor, ``EndpointError`` without an answer.
    """
    shown = await endpoint.client.weight_version(ANSWER_TIMEOUT_S)
    if shown != stamp:
        raise OtherVersionShown(endpoint.url, f"serves version {shown!r}, not {stamp!r}")
    if not bits:
        return
    described = [chunk.describe() for chunk in weights.chunks]
    proofs = await endpoint.client.prove_weights(weights.name, described)
    if not proofs:
        raise ProofFailed(endpoint.url, "none of its workers proved what it serves")
    checksums = {name: value for chunk in weights.chunks for name, value in chunk.checksums.items()}
    for number, proof in enumerate(proofs):
        differ = {n for n, value in proof.checksums.items() if checksums.get(n) != value}
        wrong = differ | proof.problems.keys()
        if wrong:  # first in the order of the artefact, then what is served beside it
            first = next((name for name in checksums if name in wrong), min(wrong))
            raise ProofFailed(
                endpoint.url,
                f"worker {number} of {len(proofs)} serves other weights than version "
                f"{weights.version}: {len(wrong)} of {len(checksums)} tensors, first {first} "
                f"({_problem(proof, first, checksums)})",
            )
    # With pipeline or expert parallelism a tensor may be in one worker only.
    proved = set().union(*(proof.checksums for proof in proofs))
    if missing := [name for name in checksums if name not in proved]:
        raise ProofFailed(
            endpoint.url,
            f"no worker proved {len(missing)} of {len(checksums)} tensors of version "
            f"{weights.version}, first {missing[0]}",
        )


def _problem(proof: WorkerProof, name: str, expected: Mapping[str, str]) -> str:
    shown = f"checksum {proof.checksums.get(name, 'missing')}, pushed {expected.get(name)}"
    return f"{proof.problems[name]}; {shown}" if name in proof.problems else shown


def check_stamp(endpoint: Endpoint, samples: Sequence[Completion], stamp: str) -> None:
    """Raises ``ProofFailed`` if a sample was made by other weights: it may have restarted."""
    stamped = {span.version for sample in samples for span in sample.version_spans}
    if stamped != {stamp}:
        wrong = ", ".join(sorted(stamped - {stamp})) or "no version"
        raise OtherVersionShown(endpoint.url, f"canary: tokens of {wrong}, not of {stamp}")


def check_canary(reading: CanaryReading, tolerance: float) -> str | None:
    """What is wrong with an endpoint's canary, in words; ``tolerance`` in nats per token."""
    if reading.num_tokens == 0:
        return "canary: its samples hold no token to compare"
    if not reading.mean <= tolerance:
        return (
            "canary: log-probabilities differ from the trainer's by "
            f"{reading.mean:.2e} nats (maximum {reading.maximum:.2e}, {reading.num_tokens} "
            f"tokens, tolerance {tolerance:.1e})"
        )
    return None
