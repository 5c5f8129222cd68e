"""Environments of the ``verifiers`` library as whole runs of a few steps: trained, on-policy.

What the library says of an episode is compared with what was sampled in it, by the journal.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.parts.verifiers_train.guessing_model import (
    MOST_TURNS,
    build_guessing_model,
    write_games,
)
from easyrl.demo.tools.build_model import build_model
from easyrl.demo.tools.task import write_splits
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.ledger.journal.codec import GroupRecord, decode_any
from easyrl.ledger.journal.record_file import read_records
from easyrl.metrics.trackers import read_metrics
from easyrl.schema import Episode
from tests.easyrl.environments.installed import folder_with, python_with
from tests.end_to_end.test_example_environments import weights
from tests.end_to_end.trainer_run import run_to_end, run_trainer, trainer_command

pytestmark = pytest.mark.runs

STEPS, BATCH, SAMPLES = 3, 4, 8
END = "<|end|>"
CALL = re.compile(
    r'<tool_call>\{"name": "calculate", "arguments": \{"expression": "(\d+)([*+])(\d+)"\}\}'
    r"</tool_call>"
)
EMPTY = "EmptyModelResponseError"  # what the library makes of a message without a text


@dataclass(frozen=True)
class Played:
    """An episode as the journal has it."""

    answer: str  # of its record
    episode: Episode
    given: list[str]  # in front of each turn's sampled tokens, what the environment wrote
    said: list[str]  # by the model, without the token that ends it


def train(
    tmp_path: Path,
    name: str,
    build: Callable[[Path], None],
    prompts: Path,
    *options: str,
    **args: int,
) -> list[Played]:
    """The episodes of a run with ``examples/verifiers/NAME``, which changes the weights.

    ``args``: of its ``load_environment``.
    """
    python = python_with(folder_with("verifiers"), tmp_path)
    model, run_dir = tmp_path / "model", tmp_path / "run"
    build(model)
    environment = {"name": name, "verifiers": name, "args": args, "python": str(python)}
    with EmbeddedServerProcess(model, ["--num-threads", "1"]) as server:
        command = trainer_command(
            run_dir,
            model,
            prompts,
            [server.url],
            *("rewards=[]", "data.apply_chat_template=true", "data.max_prompt_tokens=32"),
            *(f"environments=[{json.dumps(environment)}]", "trainer.learning_rate=1e-3"),
            *(f"trainer.batch_size={BATCH}", f"trainer.max_steps={STEPS}"),
            *(f"rollout.num_generations={SAMPLES}", "checkpoint.export_at_end=true"),
            *options,
        )
        run_trainer(command)
    played = list(episodes_of(run_dir, prompts, AutoTokenizer.from_pretrained(model)))
    assert len(played) == STEPS * BATCH * SAMPLES
    steps = [m for m in read_metrics(run_dir / "metrics.jsonl") if m["step"] > 0]
    rewards = [each.episode.reward for each in played]
    size = BATCH * SAMPLES
    assert [m["reward/mean"] for m in steps] == pytest.approx(
        [sum(rewards[i : i + size]) / size for i in range(0, len(rewards), size)]
    )
    before, after = weights(model), weights(run_dir / "model")
    assert any(not torch.equal(before[key], after[key]) for key in before)
    result = run_to_end([sys.executable, "-m", "easyrl", "verify", str(run_dir)])
    assert result.returncode == 0 and f"on-policy: {STEPS} batches" in result.stdout, result.stdout
    turns, branches = (
        sum(count(each.episode) for each in played)
        for count in (lambda e: len(e.turns), lambda e: e.num_branches)
    )
    counted = f"{len(played)} episodes of {turns} turns in {branches} branches"
    assert counted in result.stdout, result.stdout
    return played


def episodes_of(run_dir: Path, prompts: Path, tokenizer: Any) -> Iterator[Played]:
    """In the order of the batches."""
    answers = [json.loads(line)["answer"] for line in prompts.read_text().splitlines()]
    for file in sorted((run_dir / "journal").rglob("*.journal")):
        for _, payload in list(read_records(file))[1:]:
            record = decode_any(payload)
            if not isinstance(record, GroupRecord):
                continue
            for completion in record.completions:
                ids, episode = np.frombuffer(completion.token_ids, np.int32), completion.episode
                assert episode is not None
                yield Played(
                    answers[record.index],
                    episode,
                    [tokenizer.decode(ids[turn.start : turn.sampled]) for turn in episode.turns],
                    [
                        tokenizer.decode(ids[turn.sampled : turn.end]).removesuffix(END)
                        for turn in episode.turns
                    ],
                )


def in_one_branch(played: Played) -> bool:
    """Whether each turn continues the one before, exactly."""
    parents = [turn.parent for turn in played.episode.turns]
    return parents == [None, *range(len(parents) - 1)]


def test_an_environment_of_several_turns(tmp_path: Path) -> None:
    prompts = write_games(tmp_path / "prompts.jsonl", STEPS * BATCH, seed=0)
    played = train(
        tmp_path,
        "guessing",
        lambda folder: build_guessing_model(folder, num_steps=150, batch_size=32),
        prompts,
        "rollout.max_tokens=6",
        max_turns=MOST_TURNS,
    )
    compared = 0
    for each in played:
        assert in_one_branch(each)
        if each.episode.failure is not None:
            assert EMPTY in each.episode.failure and each.said[-1] == ""
            continue
        if not all(map(str.isdigit, each.said)):
            continue
        compared += 1
        number, guesses = int(each.answer), list(map(int, each.said))
        assert each.episode.reward == float(guesses[-1] == number)
        assert number not in guesses[:-1]
        assert len(guesses) == MOST_TURNS or guesses[-1] == number
        for guess, told in zip(guesses, each.given[1:], strict=False):
            hint = "higher" if guess < number else "lower"
            assert told == f"<|user|>{hint}{END}<|assistant|>"
    assert compared > 0.8 * len(played)
    assert {each.episode.reward for each in played} == {0.0, 1.0}


def test_an_environment_with_a_tool(tmp_path: Path) -> None:
    prompts, _ = write_splits(tmp_path / "data", seed=0)
    played = train(
        tmp_path,
        "products",
        lambda folder: build_model(folder, num_steps=300),
        prompts,
        "rollout.max_tokens=20",
    )
    called = 0
    for each in played:
        assert in_one_branch(each)
        if each.episode.failure is not None:
            assert EMPTY in each.episode.failure and each.said[-1] == ""
            continue
        assert each.episode.reward == float(each.said[-1] == each.answer)
        assert each.given[0].startswith(f"<|system|>calculate(expression){END}<|user|>")
        for said, told in zip(each.said, each.given[1:], strict=False):
            if found := CALL.fullmatch(said):
                a, operator, b = int(found[1]), found[2], int(found[3])
                result = a * b if operator == "*" else a + b
                assert told == f"<|tool|>{result}{END}<|assistant|>"
                called += 1
    assert called > 0.2 * len(played)
    assert {each.episode.reward for each in played} == {0.0, 1.0}
