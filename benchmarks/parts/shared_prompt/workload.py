"""The model and the loss that all sides of ``benchmarks.shared_prompt`` have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.parts.shared_prompt.sizes import RECIPE, Batch
from easyrl.config import ModelConfig
from easyrl.models.loading import load_policy_model
from easyrl.models.policy_model import PolicyModel
from easyrl.models.tri_model import TriModel
from easyrl.recipes.losses import token_loss
from easyrl.schema import FrozenLogprobs

OLD_POLICY_NOISE = 0.05  # nats between the policy and the old policy: the ratio is not 1

Forward = Callable[[], Tensor]  # the loss, a scalar to call backward on
Side = Callable[["Workload"], Forward]


@dataclass(frozen=True)
class Workload:
    """What a side computes: GRPO's loss of ``batch`` and its gradient in the policy's weights."""

    policy: PolicyModel
    batch: Batch  # the row on the device, with the log-probabilities of the old policy
    device: torch.device
    same_pass: bool  # the chunked projection forms its gradient with its values

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model: one set of weights for all sides."""
        return self.policy.model

    @property
    def frozen(self) -> FrozenLogprobs:
        frozen = self.batch.micro_batch.frozen
        assert frozen is not None
        return frozen

    def hidden_states(self, attention: str, **inputs: object) -> Tensor:
        """[B, T, H], the layers' output under transformers' attention ``attention``."""
        with attention_set_to(self.model, attention):
            output = self.model.base_model(use_cache=False, **inputs)
        return output.last_hidden_state

    def chunked_loss(self, hidden: Tensor) -> Tensor:
        """The loss of trained tokens whose predicting positions have the states ``hidden`` [N, H].

        Through the policy's own head: the same chunked projection for every side.
        """
        return self.head_outputs(hidden)[0]

    def head_outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss and, of the N trained tokens, log-probabilities and entropies."""
        head = self.model.get_output_embeddings()
        micro_batch = self.batch.micro_batch
        labels = micro_batch.label_ids
        losses = token_loss(micro_batch, self.frozen, RECIPE)
        if self.same_pass:
            loss_sum, logprobs, entropy = head(hidden, labels, 1.0, losses)
        else:
            logprobs, entropy = head(hidden, labels, 1.0)
            loss_sum = losses(logprobs, entropy, slice(None)).sum()
        return loss_sum / self.batch.denominator, logprobs, entropy


@contextmanager
def attention_set_to(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def random_policy(
    config: Qwen3Config,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "auto",
    activation_checkpointing: str = "none",
    chunk_size: int = 1024,
) -> PolicyModel:
    """A policy with random weights, written to ``folder`` and loaded as a run loads it."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        Qwen3ForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(default)
    settings = ModelConfig.model_validate(
        {
            "path": folder,
            "attention": attention,
            "activation_checkpointing": activation_checkpointing,
            "logprob_chunk_size": chunk_size,
        }
    )
    return load_policy_model(settings, dtype=dtype).to(device)


def workload(
    policy: PolicyModel, batch: Batch, device: torch.device, *, same_pass: bool
) -> Workload:
    """Adds the log-probabilities of an old policy: the policy's own, disturbed a little."""
    model = TriModel(policy, reference=None, old_policy=None, temperature=1.0, device=device)
    row = batch.micro_batch.to(device)
    logprobs = model.policy_logprobs(row)
    noise = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0))
    old = logprobs + OLD_POLICY_NOISE * noise.to(logprobs)
    frozen = FrozenLogprobs(reference=None, old_policy=old)
    batch = replace(batch, micro_batch=replace(row, frozen=frozen))
    return Workload(policy, batch, device, same_pass)
