"""The perturbation probe: visibly changed weights, pushed and seen, before the true ones follow.

It is the proof that nothing is kept beside the weights that can be read back: a second copy of a
tied head, keys and values of prompts. Its weights are the trainer's at the start of the run,
visibly changed, and stay on the host. That costs a second artefact and buys what weights changed on
the host could not: the trainer's own log-probabilities under them, taken once. An endpoint that
keeps an old copy answers neither as before nor as the trainer, whatever it was started with, and
although its weights may be equal to those that it has to serve (a run's first batch). Comparing two
answers of the endpoint with each other would only show that *something* has changed. So start-up
and mid-batch take one and the same way, the latter without the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from easyrl.schema import Completion
from easyrl.weight_sync.canary import Expected
from easyrl.weight_sync.target import Target

NOISE_FACTOR = 5.0  # a change is visible above this multiple of the noise
LEAST_VISIBLE = 1e-4  # nats; float32 noise stays below 1e-5, a one-layer model moves by 1e-3


@dataclass(frozen=True, slots=True)
class Probe:
    """The probe's weights, and what the trainer says of samples made by them."""

    weights: Target
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
        if problem := noise.problem(tolerance):
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
