"""A tiny model that knows a few answers by heart: tools called, reasoning, odd tokenisations.

Answers are learnt character by character, as the tokenizer would never write them: whoever
tokenises a history again gets other ids than were sampled. What it says to other prompts nobody has
taught it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.easyrl.gateway.gateway_parts import STRIPPING, call_text, chat_tokenizer
from tests.end_to_end.exactness.agents import ADD, NEXT, Behaviour, user

REASONING, ANSWER = "<think>\nthe long way\n</think>\n\n", "the answer is in there"
CALLS = f"Both.\n{call_text(a=1).replace(': ', ':')}\n{call_text(a=2).replace(': ', ':')}"
QUESTIONS: dict[Behaviour, str] = {
    "retokenised": "is it in there?",
    "compacted": "what happens then?",
    "reasoned": "why is it there?",
    "as_template": "why is it there?",
    "tools": "add them, and these",
    "sub_agent": "look it up",
    "forked": "this or that?",
    "retried": "once more?",
    "hung_up": "slowly, please",
    "streamed": "bit by bit?",
    "stopped": "who is the winner?",
}
NUM_STEPS, LEARNING_RATE = 800, 3e-3
KNOWN = 2e-3  # nats that a whole answer may still surprise
IGNORED = -100  # label of positions without a loss, as transformers has it


class Exercise(NamedTuple):
    """What the model is to say behind a prompt."""

    prompt: list[int]
    answer: list[int]


def write_model(folder: Path) -> Path:
    """A folder with model and tokenizer; learnt in seconds, the same on one machine."""
    tokenizer = chat_tokenizer(STRIPPING)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    learn(model, exercises(tokenizer))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def exercises(tokenizer: PreTrainedTokenizerFast) -> list[Exercise]:
    def prompt(*messages: dict[str, Any], **more: Any) -> list[int]:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **more
        )
        return tokenizer.encode(text, add_special_tokens=False)

    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    why = user(QUESTIONS["reasoned"])
    pairs = [
        (prompt(user(QUESTIONS["retokenised"])), ANSWER),
        (prompt(why), REASONING + ANSWER),
        # the template leaves the reasoning out
        (prompt(why, said(REASONING + ANSWER), user(NEXT)), "then the end"),
        (prompt(user(QUESTIONS["tools"]), tools=[ADD]), CALLS),
        (prompt(user(QUESTIONS["stopped"])), "the winner is there"),
    ]
    return [Exercise(ids, odd_ids(tokenizer, text)) for ids, text in pairs]


def odd_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Of ``text`` and the end of a turn; character by character but for the tags of reasoning."""
    ids = []
    for part in tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).tokens:
        tag = tokenizer.get_added_vocab().get(part)
        ids += [tag] if tag is not None else tokenizer.convert_tokens_to_ids(list(part))
    return [*ids, tokenizer.eos_token_id]


def learn(model: Qwen3ForCausalLM, given: list[Exercise]) -> None:
    """AdamW until each answer is known as a whole; fails if it is not after ``NUM_STEPS``."""
    ids = pad_sequence([torch.tensor([*e.prompt, *e.answer]) for e in given], batch_first=True)
    labels = pad_sequence(
        [torch.tensor([IGNORED] * len(e.prompt) + e.answer) for e in given],
        batch_first=True,
        padding_value=IGNORED,
    )[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20)
        logits = model(ids).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
        ).sum(1)
        if losses.max().item() < KNOWN:
            return
        losses.sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError(f"not learnt by heart: {losses.tolist()} nats")
