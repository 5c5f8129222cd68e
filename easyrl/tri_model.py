"""Policy, old policy and reference on one micro-batch (paper §4.1, DESIGN §5).

The three share one architecture and one layout, so one packed row and one attention mask serve all.
What is not needed does not exist: the reference is there only with a KL coefficient, the old policy
only when it is lagged or a batch has several updates; else it is the policy itself, with ratio 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from easyrl.engines.base import TokenLogprobs, TriLogprobs
from easyrl.kernels.segment_layout import SegmentLayout
from easyrl.policy_model import run_micro_batch
from easyrl.schema import MicroBatch


class FrozenModel:
    """A model that is only run without gradient, kept on the host between uses if asked.

    Args:
        module: a ``PolicyModel`` or an engine around one; on ``device`` unless ``offload``.
        device: where it runs.
        offload: the weights are in host memory and are copied over for each use; they never change
            on the device, so nothing is copied back.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, offload: bool = False) -> None:
        module.requires_grad_(False)
        module.eval()
        self.module = module
        self._device = device
        self._offload = offload

    @torch.no_grad()
    def logprobs(
        self, micro_batch: MicroBatch, layout: SegmentLayout, temperature: float
    ) -> Tensor:
        """Log-probabilities float32 [N]."""
        with self._on_device():
            logprobs, _ = run_micro_batch(
                self.module, micro_batch, temperature, layout=layout, device=self._device
            )
        return logprobs

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if not self._offload:
            yield
            return
        tensors = [*self.module.parameters(), *self.module.buffers()]
        on_host = [tensor.data for tensor in tensors]
        self.module.to(self._device)
        try:
            yield
        finally:
            for tensor, host_data in zip(tensors, on_host, strict=True):
                tensor.data = host_data


class TriModel:
    """Runs the models of the objective; only the policy's result carries gradient.

    Args:
        policy: the model being trained, an engine around it where one intercepts the forward.
        reference: frozen at the start of the run; None without a KL coefficient.
        old_policy: the weights before the previous update (``old_policy: lagged``), or those at the
            start of the batch (``updates_per_batch`` above 1); None where the policy itself is the
            old policy.
        temperature: the sampling temperature, at which all log-probabilities are taken.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        reference: FrozenModel | None,
        old_policy: FrozenModel | None,
        temperature: float,
        device: torch.device,
    ) -> None:
        self.policy = policy
        self.reference = reference
        self.old_policy = old_policy
        self.old_is_policy = False  # for now their weights are the same: one forward serves both
        self._temperature = temperature
        self._device = device

    def __call__(self, micro_batch: MicroBatch) -> TriLogprobs:
        """The three log-probabilities of the N trained tokens; float32 [N] each.

        The frozen models run first: the policy's activations, which live until the backward, are
        then not there yet.
        """
        layout = SegmentLayout(micro_batch.segments)
        old_policy = None if self.old_is_policy else self.old_policy
        frozen = [
            None if model is None else model.logprobs(micro_batch, layout, self._temperature)
            for model in (self.reference, old_policy)
        ]
        reference_logprobs, old_logprobs = frozen
        logprobs, entropy = run_micro_batch(
            self.policy, micro_batch, self._temperature, layout=layout, device=self._device
        )
        return TriLogprobs(
            policy=TokenLogprobs(logprobs, entropy),
            old_logprobs=logprobs.detach() if old_logprobs is None else old_logprobs,
            reference_logprobs=reference_logprobs,
        )

    @torch.no_grad()
    def policy_logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """The policy's log-probabilities without gradient, float32 [N]."""
        logprobs, _ = run_micro_batch(
            self.policy, micro_batch, self._temperature, device=self._device
        )
        return logprobs
