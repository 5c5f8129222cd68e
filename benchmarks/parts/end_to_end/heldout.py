"""What only training moves: how probable a model finds worked sums that nobody trains on.

The demo's reward prefers one of the habits that its model starts with, careful columns. Training
makes this habit's responses more probable, to held-out problems too; a side that generates, scores
and logs but does not update its weights leaves them where they are.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from easyrl.demo.build_model import build_tokenizer
from easyrl.demo.task import columns_response, draw_problems, split_operands

NUM_PROBLEMS = 256
IGNORED = -100


@torch.no_grad()
def heldout_logprob(model: Path) -> float:
    """Mean log-probability of the responses' tokens, nats; the same texts for every model."""
    tokenizer = build_tokenizer()
    problems = draw_problems(split_operands().heldout, NUM_PROBLEMS, random.Random(0))
    rows: list[list[int]] = []
    labels: list[list[int]] = []
    for problem in problems:
        message = [{"role": "user", "content": problem.prompt}]
        asked = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode(str(asked), add_special_tokens=False)
        text = columns_response(problem, carries=True)
        response = tokenizer.encode(text, add_special_tokens=False)
        response.append(tokenizer.eos_token_id)
        rows.append(prompt + response)
        labels.append([IGNORED] * len(prompt) + response)
    length = max(map(len, rows))
    padding = tokenizer.pad_token_id
    tokens = torch.tensor([row + [padding] * (length - len(row)) for row in rows])
    wanted = torch.tensor([row + [IGNORED] * (length - len(row)) for row in labels])
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    logits = loaded(tokens).logits[:, :-1]  # padding is behind what is causal
    return -float(cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten()))
