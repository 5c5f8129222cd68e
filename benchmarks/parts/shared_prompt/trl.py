"""TRL's loss of the same group: ``GRPOTrainer._compute_loss`` of a real trainer.

``trl`` gives TRL the chunked projection of the other sides: ``_get_per_token_logps_and_entropies``,
the method that turns tokens into log-probabilities, runs TRL's model call and hands the states to
it. ``trl_own_head`` leaves TRL as it is. Everything else is TRL's: how prompt and completion are
joined, the attention mask, the loss, what it logs.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.parts.shared_prompt.sizes import RECIPE
from benchmarks.parts.shared_prompt.workload import Forward, Workload, attention_set_to
from easyrl.demo.build_model import build_tokenizer


class _LossGradient(torch.autograd.Function):
    """Log-probabilities of a projection that has formed its gradient already.

    Backward, the gradient goes to the projection's own loss instead. It is the same loss, so the
    gradient that arrives here must be the one that was formed; that it is, the comparison of all
    sides before the timing shows.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logprobs: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return logprobs.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        return torch.ones_like(loss), None


def trl(work: Workload) -> Forward:
    """With the chunked projection of the other sides."""
    trainer = _trainer(work)

    def logprobs_and_entropies(
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **_: object,
    ) -> tuple[Tensor, Tensor, None]:
        hidden = model.base_model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        trained = attention_mask[:, -logits_to_keep:].bool()
        loss, logprobs, entropy = work.head_outputs(hidden[:, -logits_to_keep - 1 : -1][trained])
        if work.same_pass:
            logprobs = _LossGradient.apply(loss, logprobs)

        def at_their_places(values: Tensor) -> Tensor:
            return values.new_zeros(trained.shape).masked_scatter(trained, values)

        return at_their_places(logprobs), at_their_places(entropy), None

    trainer._get_per_token_logps_and_entropies = logprobs_and_entropies
    return _forward(work, trainer)


def trl_own_head(work: Workload) -> Forward:
    return _forward(work, _trainer(work))


def _forward(work: Workload, trainer: Any) -> Forward:
    batch = work.batch
    prompt_ids = batch.prompt_ids.expand(len(batch.responses), -1)
    old_logprobs = work.frozen.old_policy
    assert old_logprobs is not None
    sizes = [len(response) for response in batch.responses]
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": pad_sequence(list(batch.responses), batch_first=True),
        "completion_mask": pad_sequence(
            [torch.ones_like(response) for response in batch.responses], batch_first=True
        ),
        "advantages": batch.advantages,
        "old_per_token_logps": pad_sequence(list(old_logprobs.split(sizes)), batch_first=True),
    }
    inputs = {name: tensor.to(work.device) for name, tensor in inputs.items()}

    def forward() -> Tensor:
        with attention_set_to(work.model, "sdpa"):
            return trainer.compute_loss(work.model, inputs)

    return forward


def _trainer(work: Workload) -> Any:
    """A real ``GRPOTrainer`` around the policy's model; never trained, so it needs one prompt."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    group = len(work.batch.responses)
    original_forward = work.model.forward
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    trainer = GRPOTrainer(
        model=work.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=tempfile.gettempdir(),
            loss_type="grpo",
            beta=0.0,
            epsilon=RECIPE.clip_eps_low,
            epsilon_high=RECIPE.clip_eps_high,
            temperature=1.0,
            num_generations=group,
            per_device_train_batch_size=group,
            gradient_checkpointing=False,  # the benchmark's own option, the same on all sides
            bf16=False,  # no autocast: the weights have the dtype already
            use_cpu=work.device.type == "cpu",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": ["0"]}),
        processing_class=build_tokenizer(),
    )
    assert work.model.forward != original_forward  # TRL's own projection is in the model's forward
    trainer.current_gradient_accumulation_steps = 1  # what its training loop would set
    return trainer
