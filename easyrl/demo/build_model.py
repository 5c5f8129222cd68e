"""Builds the demo's tokenizer and model, a small Qwen3 that has seen three habits of answering.

``python -m easyrl.demo.build_model --output DIR [--tied|--untied] [--seed N]``
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from easyrl.demo.task import END_THINK, THINK, warm_start_examples

Rows = dict[str, torch.Tensor]  # input_ids and labels, both int64 [B, T]
LEARNING_RATE, WARMUP_STEPS = 3e-3, 20
IGNORED = -100  # label of positions without a loss, as transformers has it
PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_model(
    output: Annotated[Path, typer.Option(help="folder to write")],
    seed: int = 0,
    tied: Annotated[bool, typer.Option("--tied/--untied")] = True,
    num_steps: int = 700,
    batch_size: int = 64,
) -> None:
    """Writes tokenizer and warm-started model to ``output`` in Hugging Face's layout.

    The same arguments give the same weights on one machine. ``tied``: input and output embeddings
    share their weights.
    """
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = Qwen3ForCausalLM(model_config(tokenizer, tied))
    batches = supervised_batches(tokenizer, warm_start_examples(seed), batch_size)
    train_and_save(model, tokenizer, batches, num_steps, output)


def train_and_save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    batches: Iterator[list[Rows]],
    num_steps: int,
    output: Path,
) -> None:
    """Trains ``model`` on ``batches`` and writes it with its tokenizer to ``output``."""
    # two gain little on matrices this small, and wait for each other on a busy machine
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(model, batches, num_steps)
    finally:
        torch.set_num_threads(num_threads)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: 24 tokens with a chat template; known characters round-trip.

    The thinking tags are ordinary tokens: rewards look for them, so they must outlive
    ``decode(skip_special_tokens=True)``.
    """
    special = [PAD, END, UNKNOWN, *ROLES]
    words = [*special, THINK, END_THINK, *"0123456789+-*=; "]
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN)
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?think>|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=ROLES,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


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
    tokenizer: PreTrainedTokenizerFast, examples: Iterator[tuple[str, str]], batch_size: int
) -> Iterator[list[Rows]]:
    """Endless batches of (question, response) pairs, the loss on responses only; each in two halves
    by length, to pad less."""
    while True:
        batch = [_encode(tokenizer, *pair) for pair in itertools.islice(examples, batch_size)]
        batch.sort(key=lambda example: len(example[0]))
        middle = len(batch) // 2
        yield [_pad(tokenizer, half) for half in (batch[:middle], batch[middle:]) if half]


def _encode(
    tokenizer: PreTrainedTokenizerFast, question: str, response: str
) -> tuple[list[int], int]:
    """Token ids of prompt and response, and the prompt's length."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(f"{prompt}{response}{tokenizer.eos_token}", add_special_tokens=False)
    return ids, len(tokenizer.encode(prompt, add_special_tokens=False))


def _pad(tokenizer: PreTrainedTokenizerFast, examples: list[tuple[list[int], int]]) -> Rows:
    """Padded on the right: a causal model needs no mask for pads that come last."""
    input_ids = [torch.tensor(ids) for ids, _ in examples]
    labels = [torch.tensor([IGNORED] * start + ids[start:]) for ids, start in examples]
    padded = pad_sequence(input_ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    return {
        "input_ids": padded,
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


def train(model: PreTrainedModel, batches: Iterator[list[Rows]], num_steps: int) -> None:
    """AdamW on the mean over a batch's tokens; linear warm-up, then linear decay to a tenth."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / WARMUP_STEPS, 1 - 0.9 * i / num_steps)
    )
    model.train()
    start_s = time.monotonic()
    for step, batch in enumerate(itertools.islice(batches, num_steps), 1):
        num_tokens = sum(int((rows["labels"] != IGNORED).sum()) for rows in batch)
        mean_loss = 0.0
        for rows in batch:
            loss = model(**rows, num_items_in_batch=num_tokens).loss
            loss.backward()
            mean_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            progress = f"{step}/{num_steps}  loss {mean_loss:.3f}"
            print(f"warm start {progress}  {time.monotonic() - start_s:.0f} s", flush=True)
    model.eval()


if __name__ == "__main__":
    typer.run(build_model)
