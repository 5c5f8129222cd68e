"""A small model that has seen games of the example ``guessing``, played well and badly."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from easyrl.demo.build_model import IGNORED, Rows, model_config, train_and_save
from easyrl.demo.tools.build_model import build_tokenizer

QUESTION = "Guess my number."
LOW, HIGH, MOST_TURNS = 1, 15, 4  # by halves each number is found in four turns
WELL = 0.3  # share of the games in which the player halves
Piece = tuple[str, bool]  # a text, and whether the model says it


def games(rng: random.Random) -> Iterator[list[Piece]]:
    """Endless; a bad player guesses at random, whatever was said."""
    while True:
        number, plays_well = rng.randint(LOW, HIGH), rng.random() < WELL
        low, high = LOW, HIGH
        pieces = [(f"<|user|>{QUESTION}<|end|>", False)]
        for _ in range(MOST_TURNS):
            guess = (low + high) // 2 if plays_well else rng.randint(LOW, HIGH)
            pieces += [("<|assistant|>", False), (f"{guess}<|end|>", True)]
            if guess == number:
                break
            if guess < number:
                low = max(low, guess + 1)
            else:
                high = min(high, guess - 1)
            pieces.append((f"<|user|>{'higher' if guess < number else 'lower'}<|end|>", False))
        yield pieces


def build_guessing_model(output: Path, num_steps: int = 800, batch_size: int = 64) -> None:
    """Writes tokenizer and model to ``output``."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    played = games(random.Random("guessing"))

    def encoded(pieces: list[Piece]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels: list[int] = []
        for text, is_said in pieces:
            own = tokenizer.encode(text, add_special_tokens=False)
            ids += own
            labels += own if is_said else [IGNORED] * len(own)
        return ids, labels

    def batches() -> Iterator[list[Rows]]:
        while True:
            rows = [encoded(pieces) for pieces in itertools.islice(played, batch_size)]
            longest = max(len(ids) for ids, _ in rows)
            pad = int(tokenizer.pad_token_id)
            ids = [own + [pad] * (longest - len(own)) for own, _ in rows]
            labels = [own + [IGNORED] * (longest - len(own)) for _, own in rows]
            yield [{"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}]

    config = model_config(tokenizer, tied=True)
    train_and_save(Qwen3ForCausalLM(config), tokenizer, batches(), num_steps, output)


def write_games(path: Path, count: int, seed: int) -> Path:
    """Prompts with the number to be found as ``answer``."""
    rng = random.Random(seed)
    records = [{"prompt": QUESTION, "answer": str(rng.randint(LOW, HIGH))} for _ in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
