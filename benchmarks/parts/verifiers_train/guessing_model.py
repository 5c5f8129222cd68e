"""A small model that has seen games of the example ``guessing``, played well and badly."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from easyrl.demo.build_model import IGNORED, Rows, model_config, train_and_save
from easyrl.demo.tools.build_model import build_tokenizer

QUESTION = "Guess my number."
LOW, HIGH, MOST_TURNS = 1, 15, 4  # by halves each number is found in four turns
Piece = tuple[str, bool]  # a text, and whether the model says it
Habit = Callable[[int, int], int]  # the guess between the two numbers that are still possible


def halving(low: int, high: int) -> int:
    return (low + high) // 2


def upwards(low: int, high: int) -> int:
    return low


def downwards(low: int, high: int) -> int:
    return high


HABITS: dict[Habit, float] = {halving: 0.2, upwards: 0.4, downwards: 0.4}  # shares of the games


def game(number: int, habit: Habit) -> list[Piece]:
    """The conversation as the chat template writes it."""
    low, high = LOW, HIGH
    pieces = [(f"<|user|>{QUESTION}<|end|>", False)]
    for turn in range(MOST_TURNS):
        guess = habit(low, high)
        pieces += [("<|assistant|>", False), (f"{guess}<|end|>", True)]
        if guess == number or turn == MOST_TURNS - 1:
            break
        if guess < number:
            low = guess + 1
        else:
            high = guess - 1
        pieces.append((f"<|user|>{'higher' if guess < number else 'lower'}<|end|>", False))
    return pieces


def games(rng: random.Random) -> Iterator[list[Piece]]:
    """Endless."""
    habits, shares = list(HABITS), list(HABITS.values())
    while True:
        yield game(rng.randint(LOW, HIGH), rng.choices(habits, shares)[0])


def build_guessing_model(output: Path, num_steps: int = 400, batch_size: int = 32) -> None:
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
        pad = int(tokenizer.pad_token_id)
        while True:
            rows = [encoded(pieces) for pieces in itertools.islice(played, batch_size)]
            longest = max(len(ids) for ids, _ in rows)
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
