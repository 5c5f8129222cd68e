"""The embedded server's benchmark: prompts that no rows share, equal sampling on both sides."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import embedded_server
from benchmarks.parts.embedded_server.sides import Generate, Seconds, Server, Work
from benchmarks.parts.random_model import write_random_model


class AskedServer(Server):
    """Answers at once."""

    def __init__(self) -> None:
        self.asked: list[Work] = []

    async def run(self, work: Work) -> Seconds:
        self.asked.append(work)
        return Seconds(1.0, 0.5, 0.1)


class AskedGenerate(Generate):
    """The same."""

    def __init__(self) -> None:
        self.asked: list[Work] = []

    def run(self, work: Work, num_threads: int) -> float:
        self.asked.append(work)
        return 2.0

    def forwards_s(self, work: Work) -> float:
        return 1.0


def test_no_prompt_comes_twice_and_both_sides_get_the_same() -> None:
    server, generate = AskedServer(), AskedGenerate()
    arguments = argparse.Namespace(repeats=3, response=8)
    sizes = [(16, 128, 8), (32, 128, 8), (8, 128, 1)]
    rows = [
        embedded_server.measure(server, generate, number, *size, arguments)
        for number, size in enumerate(sizes, 1)
    ]
    assert [(row["sequences"], row["prompt"], row["samples"]) for row in rows] == sizes
    assert [row["ratio"] for row in rows] == [2.0] * 3
    prompts = [tuple(prompt) for work in server.asked for prompt in work.prompts()]
    assert len(prompts) == 3 * (2 + 4 + 8) == len(set(prompts))
    assert set(server.asked) == set(generate.asked)
    assert all(work.num_groups * work.group_size in (16, 32, 8) for work in server.asked)


def test_generate_samples_from_the_whole_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind one prompt: almost uniform, of more tokens than the library's default of 50 leaves."""
    path = write_random_model(tmp_path, hidden_size=32, num_layers=1, vocab_size=200)
    side = Generate(path)
    model = side._model
    sampled: list[torch.Tensor] = []
    generate = model.generate

    def kept(*args: object, **kwargs: object) -> torch.Tensor:
        sampled.append(generate(*args, **kwargs))
        return sampled[-1]

    monkeypatch.setattr(model, "generate", kept)
    side.run(Work(1, 256, 1, 1, seed=1), num_threads=torch.get_num_threads())
    tokens = np.unique(sampled[-1][:, 1:].numpy())
    assert len(tokens) > 50
