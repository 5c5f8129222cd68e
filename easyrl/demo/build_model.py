"""Builds the demo's model: a small Qwen3 that has seen the task's two ways of answering.

``python -m easyrl.demo.build_model --output DIR [--tied|--untied] [--seed N]``

The supervised warm start shows true answers only, most of them without a scratchpad. The model then mostly
blurts an answer out, which at its size is mostly wrong, and sometimes works in columns, which is mostly
right. What pays is for the reinforcement learning to find out.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from easyrl.demo.task import Habits, warm_start_examples
from easyrl.demo.tokenizer import build_tokenizer

IGNORED = -100  # label of positions without a loss, as transformers has it


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The supervised training before the reinforcement learning."""

    num_steps: int = 500
    batch_size: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    habits: Habits = Habits()


def build_model(
    output: Path, seed: int = 0, tied: bool = True, warm_start: WarmStart | None = None
) -> None:
    """Writes tokenizer and warm-started model to ``output``; the same bytes for the same arguments."""
    warm_start = warm_start or WarmStart()
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = Qwen3ForCausalLM(model_config(tokenizer, tied))
    train(model, supervised_batches(tokenizer, seed, warm_start), warm_start)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def model_config(tokenizer: PreTrainedTokenizerFast, tied: bool) -> Qwen3Config:
    """Grouped-query attention, 0.4 million parameters, fp32."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def supervised_batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, warm_start: WarmStart
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless ``(input_ids, labels)``, int64 [batch, T], padded on the right, loss on responses only."""
    examples = warm_start_examples(seed, warm_start.habits)
    while True:
        rows = [
            _encode(tokenizer, question, response)
            for question, response in itertools.islice(examples, warm_start.batch_size)
        ]
        width = max(len(ids) for ids, _ in rows)
        input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), IGNORED)
        for row, (ids, num_prompt) in enumerate(rows):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            labels[row, num_prompt : len(ids)] = input_ids[row, num_prompt : len(ids)]
        yield input_ids, labels


def _encode(tokenizer: PreTrainedTokenizerFast, question: str, response: str) -> tuple[list[int], int]:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    response_ids = tokenizer.encode(response, add_special_tokens=False)
    return prompt_ids + response_ids + [tokenizer.eos_token_id], len(prompt_ids)


def train(
    model: Qwen3ForCausalLM,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    warm_start: WarmStart,
) -> None:
    """AdamW with a linear warm-up and a linear decay to a tenth."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=warm_start.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / warm_start.warmup_steps, 1 - 0.9 * step / warm_start.num_steps
        ),
    )
    model.train()
    start_s = time.monotonic()
    for step, (input_ids, labels) in enumerate(itertools.islice(batches, warm_start.num_steps), 1):
        # Right padding needs no mask here: a causal model's real positions do not see what follows them.
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            seconds = time.monotonic() - start_s
            print(f"warm start {step}/{warm_start.num_steps}  loss {loss.item():.3f}  {seconds:.0f} s")
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the demo's tokenizer and model.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--untied", dest="tied", action="store_false")
    arguments = parser.parse_args()
    build_model(arguments.output, seed=arguments.seed, tied=arguments.tied)


if __name__ == "__main__":
    main()
