"""What an endpoint has to show before a request of a version goes to it (docs/endpoints.md).

*Version and checksums* are the proof that a small step arrived: what is served, read back by each
of the endpoint's workers and hashed with a fresh nonce, is the artefact. The *canary* compares what
the endpoint samples with the trainer's log-probabilities. (For what neither sees there is the
*probe*.)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from easyrl.inference_client.client import WorkerProof
from easyrl.inference_client.errors import EndpointError, EndpointUnavailable
from easyrl.inference_client.pool.endpoint_pool import Endpoint
from easyrl.inference_client.transfer.artifact_reader import DamagedArtifact
from easyrl.inference_client.vllm_plugin.easyrl_vllm.chunk_format import DTYPES
from easyrl.inference_client.vllm_plugin.easyrl_vllm.keyed_digests import whole_slice
from easyrl.schema import BASE_PROOF_HOLDS, Completion, PolicyVersion, WeightProof, other_run
from easyrl.weight_sync.canary import (
    GROSS_DIFFERENCE,
    Canary,
    CanaryReading,
    Expect,
    Expected,
    without_outliers,
)
from easyrl.weight_sync.challenge import (
    Challenge,
    Findings,
    SliceOf,
    UnknownSlices,
    answers_digest,
)
from easyrl.weight_sync.push import ANSWER_TIMEOUT_S, together
from easyrl.weight_sync.target import Target

logger = logging.getLogger(__name__)

NOISE_FACTOR = 5.0  # a change is visible above this multiple of the noise
PROBE = ":probe"  # behind the version whose changed weights a probe is
LEAST_VISIBLE = 1e-4  # nats; float32 noise stays below 1e-5, a one-layer model moves by 1e-3


class ProofFailed(EndpointError):
    """An endpoint showed other weights under the version that it was given."""


class OtherVersionShown(EndpointError):
    """It shows another version than it was given: it has restarted, or is given another one."""


@dataclass(frozen=True, slots=True)
class BitsShown:
    """Right answers of all workers of an endpoint."""

    challenge: Challenge
    proofs: Sequence[WorkerProof]

    @property
    def layout(self) -> list[SliceOf]:
        """Which slices its workers serve."""
        return [(name, served.slice) for proof in self.proofs
                for name, answer in proof.slices.items() for served in answer]  # fmt: skip

    def record(self) -> WeightProof:
        """For the certificate."""
        tensors = self.challenge.tensors
        whole = [(name, whole_slice(DTYPES[d], shape)) for name, (d, shape) in tensors.items()]
        return WeightProof(
            self.challenge.nonce.hex(),
            len(tensors),
            len(self.proofs),
            answers_digest(self.proofs),
            whole=sorted(self.layout, key=str) == sorted(whole, key=str),
        )


@dataclass(slots=True)
class Shown:
    """What an endpoint has shown of a version, and the seconds that it took."""

    samples: Sequence[Completion] = ()
    expected: Expected | None = None  # of ``samples``; None: without a canary
    reading: CanaryReading | None = None
    proof: WeightProof | None = None  # None: no bits were asked for
    base: WeightProof | None = None  # of the model below an adapter, the last one
    owes_canary: bool = False  # it serves the version, and has yet to pass its canary
    probe_s: float = 0.0
    proof_s: float = 0.0  # version and checksums
    canary_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """Visibly changed weights, pushed and seen before the true ones follow (perturbation probe).

    It is the proof that nothing is kept beside the weights that can be read back: a second copy of
    a tied head, keys and values of prompts. Its weights are the trainer's at the start of the run,
    changed, and stay on the host; the trainer's log-probabilities under them are taken once. So
    start-up and mid-batch go one way, the latter without the trainer.
    """

    weights: Target
    changed: Expected  # under these weights
    true: Expected  # of the same samples, under the weights that they were made from

    def visible(self, samples: Sequence[Completion]) -> float:
        """Mean |Δ log-prob| between an endpoint with these weights and the true ones, nats."""
        return self.true.reading(samples).mean

    def check(self, samples: Sequence[Completion], tolerance: float, limit: float) -> str | None:
        """What is wrong with an endpoint that was given these weights, in words.

        ``tolerance`` and ``limit`` are the ``Prover``'s.

        It has to agree with the trainer and to have moved from the true weights much further than
        the noise measured on the same samples: the tolerance is generous (5e-2 nats in bf16), a
        small model's log-probabilities move by less when its weights change by 5 %. A stale copy
        moves all tokens, rounding may move a few by nats (a router that flips): what is left
        without these decides, as long as the mean is one that the canary grants afterwards.
        """
        noise, change = self.changed.differences(samples), self.true.differences(samples)
        problem = _probe_problem(noise, change, tolerance)
        if problem is None or CanaryReading.of(noise).problem(limit) is not None:
            return problem
        most = without_outliers(noise)
        return problem if _probe_problem(noise[most], change[most], tolerance) else None


def _probe_problem(noise: np.ndarray, change: np.ndarray, tolerance: float) -> str | None:
    """What is wrong with an endpoint whose tokens have these |Δ log-prob| with the probe's weights.

    ``noise``: against the trainer's with the same weights; ``change``: with the true ones.
    """
    reading, visible = CanaryReading.of(noise), CanaryReading.of(change).mean
    if problem := reading.problem(tolerance):
        return f"with the probe's weights, {problem}"
    needed = max(NOISE_FACTOR * reading.mean, LEAST_VISIBLE)
    if visible > needed:
        return None
    return (
        f"the probe's change moved log-probabilities by {visible:.2e} nats only, not visible "
        f"above {needed:.2e} (noise {reading.mean:.2e}); if the endpoint is sound, switch "
        "weight_sync.probe off"
    )


@dataclass
class Prover:
    """Has endpoints show what they serve. In the pool's loop.

    Attributes:
        tolerance: of the canary's mean |Δ log-prob|, nats; it decides with the probe's weights,
            which show what the bits do not. With the true ones, where the bits are proved,
            ``limit`` decides, and what is above the tolerance is warned of once.
        reads_bits: whether the hash of every served tensor is read back and compared.
        probe_shifts: by URL, of those that have shown the probe's change since they started: the
            nats by which it moved their samples; infinite once they have shown the true weights
            again.
        passed: URLs of those that have passed a canary since they started, failed or were away
            last; also with the probe's weights.
    """

    canary: Canary
    tolerance: float
    reads_bits: bool
    probe_shifts: dict[str, float] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    _warned: set[str] = field(default_factory=set, init=False)  # URLs

    @property
    def limit(self) -> float:
        """Of the canary's mean |Δ log-prob|, nats: above it an endpoint has failed."""
        return max(self.tolerance, GROSS_DIFFERENCE) if self.reads_bits else self.tolerance

    def __post_init__(self) -> None:
        self._layouts: dict[str, list[SliceOf]] = {}  # by URL, of its last good proof
        # by URL, the last good proof of the model below an adapter, and the number of the first
        # version that it was shown with; None: of none yet
        self._bases: dict[str, tuple[WeightProof, int | None]] = {}

    async def prove_bits(
        self, endpoint: Endpoint, weights: Target, stamp: str, shown: Shown
    ) -> None:
        """Version and checksums; nothing is generated.

        What it shows goes into ``shown``, seconds are added. Raises ``ProofFailed``,
        ``OtherVersionShown``, ``EndpointError`` without an answer.
        """
        start_s = time.monotonic()
        layout = self._layouts.get(endpoint.url, ())
        bits = await prove_weights(
            endpoint, weights, stamp=stamp, bits=self.reads_bits, layout=layout
        )
        if bits is not None:
            self._layouts[endpoint.url] = bits.layout
            shown.proof = bits.record()
            if weights.base is not None:
                number = PolicyVersion.parse(weights.version.removesuffix(PROBE)).v
                shown.base = await self._prove_base_if_due(endpoint, weights.base, number)
        shown.proof_s += time.monotonic() - start_s

    async def prove_base(self, endpoint: Endpoint, base: Target) -> WeightProof:
        """That ``endpoint`` has the model below the adapters. Raises as ``prove_bits``."""
        try:
            proof = (await prove_tensors(endpoint, base)).record()
        except ProofFailed as error:
            raise ProofFailed(
                endpoint.url,
                f"does not serve the model below the adapter ({error.reason}): start it with the "
                "trainer's model.path and --dtype, or set weight_sync.lora=merged",
            ) from None
        self._bases[endpoint.url] = proof, None
        return proof

    async def _prove_base_if_due(
        self, endpoint: Endpoint, base: Target, number: int
    ) -> WeightProof:
        """``number``: of the version that is proved, which counts those that it missed, too."""
        proof, since = self._bases.get(endpoint.url, (None, None))
        if proof is None or (since is not None and number - since >= BASE_PROOF_HOLDS):
            proof, since = await self.prove_base(endpoint, base), None
        self._bases[endpoint.url] = proof, number if since is None else since
        return proof

    async def compare_samples(
        self, endpoint: Endpoint, stamp: str, expect: Expect, shown: Shown
    ) -> None:
        """The canary, of an endpoint that generates; ``expect`` tells what it should show.

        Into ``shown``, and raises, as ``prove_bits``.
        """
        start_s = time.monotonic()
        shown.samples = await self.sample(endpoint, stamp)
        shown.canary_s += time.monotonic() - start_s
        shown.expected = await expect(endpoint.url, shown.samples)
        shown.reading = shown.expected.reading(shown.samples)
        # After the probe it has to come back much nearer than half-way: keys and values of the
        # canary that were left from the probe's weights show, also below the tolerance.
        shift = self.probe_shifts.get(endpoint.url)
        limit = self.limit
        if shift is not None and not shown.reading.trimmed <= shift / 2:
            limit = min(limit, shift / 2)  # which the mean is above, too
        if problem := shown.reading.problem(limit):
            raise ProofFailed(endpoint.url, problem)
        self._warn(endpoint.url, shown.reading)
        self.passed.add(endpoint.url)
        shown.owes_canary = False
        if shift is not None:
            self.probe_shifts[endpoint.url] = np.inf

    def has_passed(self, url: str) -> bool:
        """Whether it has since all that ``passed`` names, and since it was given the probe."""
        return url in self.passed and self.probe_shifts.get(url, np.inf) == np.inf

    def was_away(self, url: str) -> None:
        """It may have restarted: it has to pass a canary before one may follow again."""
        self.passed.discard(url)

    def forget(self, url: str) -> None:
        """The endpoint at ``url`` has restarted or failed: it has to show all of it again."""
        self.probe_shifts.pop(url, None)
        self.passed.discard(url)
        self._bases.pop(url, None)

    def _warn(self, url: str, reading: CanaryReading) -> None:
        problem = reading.problem(self.tolerance)
        if problem is not None and url not in self._warned:
            self._warned.add(url)
            logger.warning(
                "%s: %s; it proves the right bits and is used: rounding of its kernels or its "
                "dtype, or sampling settings of its own; compare the flags in docs/endpoints.md",
                url,
                problem,
            )

    async def sample(self, endpoint: Endpoint, stamp: str) -> list[Completion]:
        """The canary's samples. Raises ``OtherVersionShown`` if not all tokens carry ``stamp``."""
        samples = await self.canary.sample(endpoint)
        stamped = {span.version for sample in samples for span in sample.version_spans}
        if stamped != {stamp}:  # made by other weights: it may have restarted
            others = sorted(stamped - {stamp})
            wrong, why = ", ".join(others) or "no version", other_run(stamp, *others)
            raise OtherVersionShown(endpoint.url, f"canary: tokens of {wrong}, not of {stamp}{why}")
        return samples


async def prove_weights(
    endpoint: Endpoint,
    weights: Target,
    *,
    stamp: str,
    bits: bool,
    layout: Iterable[SliceOf] = (),
) -> BitsShown | None:
    """``stamp`` and, if ``bits`` are asked for, every tensor in every worker.

    ``layout``: slices that are expected in the answers, whose digests are formed meanwhile. Raises
    ``ProofFailed`` naming the first wrong tensor, ``OtherVersionShown``, ``EndpointError`` without
    an answer.
    """
    if not bits:
        await _check_stamp(endpoint, stamp)
        return None
    _, shown = await together(
        _check_stamp(endpoint, stamp), prove_tensors(endpoint, weights, layout)
    )
    return shown


async def _check_stamp(endpoint: Endpoint, stamp: str) -> None:
    """Raises ``OtherVersionShown`` unless ``endpoint`` shows ``stamp``."""
    shown = await endpoint.client.weight_version(ANSWER_TIMEOUT_S)
    if shown != stamp:
        why = other_run(stamp, shown)
        raise OtherVersionShown(endpoint.url, f"serves version {shown!r}, not {stamp!r}{why}")


async def prove_tensors(
    endpoint: Endpoint, weights: Target, layout: Iterable[SliceOf] = ()
) -> BitsShown:
    """Every tensor of ``weights`` in every worker; raises as ``prove_weights``."""
    challenge = weights.challenge(endpoint.url)
    asked = challenge.nonce, challenge.tensors
    if weights.model is None:
        answer = endpoint.client.prove_weights(*asked)
    else:
        answer = endpoint.client.prove_weights(*asked, weights.model)
    try:
        proofs, _ = await asyncio.gather(
            answer,
            asyncio.to_thread(challenge.prepare, layout),
        )
        if not proofs:
            raise ProofFailed(endpoint.url, "none of its workers proved what it serves")
        findings = await asyncio.to_thread(challenge.check, proofs)
    except (DamagedArtifact, UnknownSlices) as error:  # no word of the endpoint's is wrong
        raise EndpointUnavailable(endpoint.url, f"cannot be proved: {error}") from error
    _refuse(endpoint, weights.version, challenge.tensors, findings)
    return BitsShown(challenge, proofs)


def _refuse(endpoint: Endpoint, version: str, tensors: Collection[str], findings: Findings) -> None:
    """Raises ``ProofFailed`` naming the first tensor that is wrong or missing, if any is."""
    for number, wrong in enumerate(findings.wrong):
        if wrong:  # first in the order of the artefact, then what is served beside it
            first = next((name for name in tensors if name in wrong), min(wrong))
            raise ProofFailed(
                endpoint.url,
                f"worker {number} of {len(findings.wrong)} serves other weights than version "
                f"{version}: {len(wrong)} of {len(tensors)} tensors, first {first[:200]} "
                f"({wrong[first][:500]})",
            )
    if findings.uncovered:  # with pipeline or expert parallelism one may be in one worker only
        raise ProofFailed(
            endpoint.url,
            f"no worker proved {len(findings.uncovered)} of {len(tensors)} tensors of version "
            f"{version}, first {findings.uncovered[0]}",
        )
