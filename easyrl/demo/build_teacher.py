"""Builds the teacher of the demo's distillation: a larger model of another family, careful alone.

``python -m easyrl.demo.build_teacher --output DIR [--seed N]``
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from easyrl.demo.build_model import build_tokenizer, supervised_batches, train_and_save
from easyrl.demo.task import warm_start_examples


def build_teacher(
    output: Annotated[Path, typer.Option(help="folder to write")],
    seed: int = 0,
    num_steps: int = 400,
    batch_size: int = 64,
) -> None:
    """Writes tokenizer and model to ``output`` in Hugging Face's layout.

    It has seen the columns with care, and neither of the other habits, on the operands of the
    policy's own warm start. The same arguments give the same weights on one machine.
    """
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = LlamaForCausalLM(teacher_config(tokenizer))
    careful = warm_start_examples(seed, estimate=0.0, careless=0.0)
    batches = supervised_batches(tokenizer, careful, batch_size)
    train_and_save(model, tokenizer, batches, num_steps, output)


def teacher_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Three layers of hidden size 192, 1.0 million parameters, fp32: three times the policy's."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


if __name__ == "__main__":
    typer.run(build_teacher)
