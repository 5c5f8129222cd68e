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
    lengths = [((128,) * 2, 8), ((128,) * 4, 8), ((128,) * 8, 1), ((64, 32, 32), 8)]
    cases = [embedded_server.Case(*each, prompt="some") for each in lengths]
    rows = [
        embedded_server.measure(server, generate, number, case, arguments)
        for number, case in enumerate(cases, 1)
    ]
    assert [(row["sequences"], row["samples"]) for row in rows] == [
        (16, 8),
        (32, 8),
        (8, 1),
        (24, 8),
    ]
    assert [row["ratio"] for row in rows] == [2.0] * 4
    assert list(rows[0])[:5] == ["sequences", "prompt", "ours", "generate", "ratio"]
    prompts = [tuple(prompt) for work in server.asked for prompt in work.token_ids()]
    assert len(prompts) == 3 * (2 + 4 + 8 + 3) == len(set(prompts))
    assert set(server.asked) == set(generate.asked)


def test_rows_are_the_grid_one_without_groups_and_mixed_lengths() -> None:
    found = embedded_server.cases([8, 64], [0, 1024])
    told = [(case.num_sequences, case.prompt, case.num_samples) for case in found]
    words = "60 of 32, 4 of 1024"
    assert told == [
        *((8, 0, 8), (64, 0, 8), (8, 1024, 8), (64, 1024, 8)),
        *((64, 128, 1), (64, words, 1), (512, words, 8)),
    ]
    assert found[0].prompts == (1,)  # something has to be decoded from
    mixed = found[-1].prompts
    assert mixed.count(32) == 60 and [n for n in range(64) if mixed[n] == 1024] == [0, 16, 32, 48]


def test_generate_gets_a_batch_for_each_length() -> None:
    work = Work((3, 1, 3), 8, 4, seed=5)
    first, second, third = (tokens.tolist() for tokens in work.token_ids())
    assert [batch.tolist() for batch in work.batches()] == [[second], [first, third]]


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
    side.run(Work((1,), 256, 1, seed=1), num_threads=torch.get_num_threads())
    tokens = np.unique(sampled[-1][:, 1:].numpy())
    assert len(tokens) > 50
