"""What an endpoint has to show before a request of a version goes to it (DESIGN §2.5).

*Version and checksums* are the proof that a small step arrived: what is served, read back by each
of the endpoint's workers, has the artefact's hashes. The *canary* compares what the endpoint
samples with the trainer's log-probabilities. The *probe* is the proof that nothing is kept beside
the weights that can be read back: a second copy of a tied head, keys and values of prompts.

The probe's weights are the trainer's at the start of the run, visibly changed, and stay on the
host. That costs a second artefact and buys what weights changed on the host could not: the
trainer's own log-probabilities under them, taken once. An endpoint that keeps an old copy answers
neither as before nor as the trainer, whatever it was started with, and although its weights may be
equal to those that it has to serve (a run's first batch). Comparing two answers of the endpoint
with each other would only show that *something* has changed. So start-up and repairs in mid-batch
take one and the same way, the latter without the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from easyrl.inference_client.client import WorkerProof
from easyrl.inference_client.errors import EndpointError
from easyrl.inference_client.pool.pool import Endpoint
from easyrl.schema import Completion
from easyrl.weight_sync.canary import CanaryReading, Expected
from easyrl.weight_sync.delivery import ANSWER_TIMEOUT_S, WeightStream

NOISE_FACTOR = 5.0  # a change is visible above this multiple of the noise
LEAST_VISIBLE = 1e-4  # nats; float32 noise stays below 1e-5, a one-layer model moves by 1e-3


class ProofFailed(EndpointError):
    """An endpoint answered, and what it showed is not what it was given."""


async def prove_weights(endpoint: Endpoint, weights: WeightStream, *, bits: bool) -> None:
    """Version and, if ``bits`` are asked for, the checksum of every tensor in every worker.

    Raises ``ProofFailed`` naming the first wrong tensor, ``EndpointError`` without an answer.
    """
    served = await endpoint.client.weight_version(ANSWER_TIMEOUT_S)
    if served != weights.version:
        raise ProofFailed(endpoint.url, f"serves version {served!r}, not {weights.version!r}")
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
    shown = set().union(*(proof.checksums for proof in proofs))
    if missing := [name for name in checksums if name not in shown]:
        raise ProofFailed(
            endpoint.url,
            f"no worker proved {len(missing)} of {len(checksums)} tensors of version "
            f"{weights.version}, first {missing[0]}",
        )


def _problem(proof: WorkerProof, name: str, expected: Mapping[str, str]) -> str:
    shown = f"checksum {proof.checksums.get(name, 'missing')}, pushed {expected.get(name)}"
    return f"{proof.problems[name]}; {shown}" if name in proof.problems else shown


def check_stamp(endpoint: Endpoint, samples: Sequence[Completion], version: str) -> None:
    """Raises ``ProofFailed`` if a sample was made by other weights: it may have restarted."""
    stamped = {span.version for sample in samples for span in sample.version_spans}
    if stamped != {version}:
        wrong = ", ".join(sorted(stamped - {version})) or "no version"
        raise ProofFailed(endpoint.url, f"canary: tokens of {wrong}, not of {version}")


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


@dataclass(frozen=True, slots=True)
class Probe:
    """Visibly changed weights, and what the trainer says of samples made by them."""

    weights: WeightStream
    changed: Expected  # under these weights
    true: Expected  # of the same samples, under the weights that they were made from

    def visible(self, samples: Sequence[Completion]) -> float:
        """Mean |Δ log-prob| between an endpoint with these weights and the true ones, nats."""
        return self.true.reading(samples).mean

    def check(self, samples: Sequence[Completion], tolerance: float) -> str | None:
        """What is wrong with an endpoint that was given these weights, in words.

        It has to agree with the trainer and to have moved much further than that from the true
        weights. Against the noise measured on the same samples, not only against the tolerance:
        that one is generous (5e-2 nats in bf16), and a small model's log-probabilities move by less
        than it when its weights change by 5 %.
        """
        noise = self.changed.reading(samples)
        problem = check_canary(noise, tolerance)
        if problem is not None:
            return f"with the probe's weights, {problem}"
        visible = self.visible(samples)
        needed = max(NOISE_FACTOR * noise.mean, LEAST_VISIBLE)
        if visible > needed:
            return None
        return (
            f"the probe's change moved log-probabilities by {visible:.2e} nats only, not visible "
            f"above {needed:.2e} (noise {noise.mean:.2e}); if the endpoint is sound, switch "
            "weight_sync.probe off"
        )
