"""Builds the demo's model: a small Qwen3 that has seen the task's three habits of answering.

``python -m easyrl.demo.build_model --output DIR [--tied|--untied] [--seed N]``

The supervised warm start leaves a model that imitates its mixed corpus: it guesses, adds columns
without the carries, or adds them carefully, each as often as it was shown, and makes slips besides.
Which of these pays is for the reinforcement learning to find out.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from easyrl.demo.task import Habits, warm_start_examples
from easyrl.demo.tokenizer import build_tokenizer

IGNORED = -100  # label of positions without a loss, as transformers has it


class Rows(NamedTuple):
    """Examples padded on the right; a causal model needs no mask for pads that come last."""

    input_ids: torch.Tensor  # int64 [B, T]
    labels: torch.Tensor  # int64 [B, T]


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The supervised training before the reinforcement learning."""

    num_steps: int = 700
    batch_size: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    habits: Habits = Habits()


def build_model(
    output: Path, seed: int = 0, tied: bool = True, warm_start: WarmStart | None = None
) -> None:
    """Writes tokenizer and warm-started model to ``output`` in Hugging Face's layout.

    The same arguments give the same weights on one machine. ``tied``: input and output embeddings
    share their weights.
    """
    warm_start = warm_start or WarmStart()
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = Qwen3ForCausalLM(model_config(tokenizer, tied))
    with _one_thread():
        train(model, supervised_batches(tokenizer, seed, warm_start), warm_start)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Two threads gain little on matrices this small, and wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def model_config(tokenizer: PreTrainedTokenizerFast, tied: bool) -> Qwen3Config:
    """Grouped-query attention, 0.3 million parameters, fp32."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
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
) -> Iterator[list[Rows]]:
    """Endless batches, the loss on responses only; each in two halves by length, to pad less."""
    examples = warm_start_examples(seed, warm_start.habits)
    while True:
        batch = [
            _encode(tokenizer, question, response)
            for question, response in itertools.islice(examples, warm_start.batch_size)
        ]
        batch.sort(key=lambda example: len(example[0]))
        middle = len(batch) // 2
        yield [_pad(tokenizer, half) for half in (batch[:middle], batch[middle:]) if half]


def _pad(tokenizer: PreTrainedTokenizerFast, examples: list[tuple[list[int], int]]) -> Rows:
    width = max(len(ids) for ids, _ in examples)
    input_ids = torch.full((len(examples), width), tokenizer.pad_token_id)
    labels = torch.full((len(examples), width), IGNORED)
    for row, (ids, num_prompt) in enumerate(examples):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, num_prompt : len(ids)] = input_ids[row, num_prompt : len(ids)]
    return Rows(input_ids, labels)


def _encode(
    tokenizer: PreTrainedTokenizerFast, question: str, response: str
) -> tuple[list[int], int]:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    response_ids = tokenizer.encode(response, add_special_tokens=False)
    return prompt_ids + response_ids + [tokenizer.eos_token_id], len(prompt_ids)


def train(model: Qwen3ForCausalLM, batches: Iterator[list[Rows]], warm_start: WarmStart) -> None:
    """AdamW on the mean over a batch's tokens; linear warm-up, then linear decay to a tenth."""
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
    for step, batch in enumerate(itertools.islice(batches, warm_start.num_steps), 1):
        num_tokens = sum(int((rows.labels != IGNORED).sum()) for rows in batch)
        mean_loss = 0.0
        for rows in batch:
            loss = model(
                input_ids=rows.input_ids, labels=rows.labels, num_items_in_batch=num_tokens
            ).loss
            loss.backward()
            mean_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            seconds = time.monotonic() - start_s
            print(
                f"warm start {step}/{warm_start.num_steps}  loss {mean_loss:.3f}  {seconds:.0f} s",
                flush=True,
            )
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the demo's tokenizer and model.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    tying = parser.add_mutually_exclusive_group()
    tying.add_argument("--tied", dest="tied", action="store_true", help="one embedding (default)")
    tying.add_argument("--untied", dest="tied", action="store_false", help="an output one besides")
    parser.set_defaults(tied=True)
    arguments = parser.parse_args()
    build_model(arguments.output, seed=arguments.seed, tied=arguments.tied)


if __name__ == "__main__":
    main()
