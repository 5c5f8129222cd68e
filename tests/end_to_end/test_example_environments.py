"""The examples of environments as whole runs of a few steps: trained, on-policy, turns counted."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from easyrl.config.file import load_config
from easyrl.demo.build_model import IGNORED, Rows, model_config, train_and_save
from easyrl.demo.tools.build_model import build_tokenizer
from easyrl.demo.tools.task import ARGUMENT, ERROR, NO_TOOL, TOOL, tool_call
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.ledger.journal.codec import GroupRecord, decode_any
from easyrl.ledger.journal.record_file import read_records
from easyrl.metrics.trackers import read_metrics
from easyrl.schema import Completion
from tests.end_to_end.trainer_run import ROOT, run_to_end, run_trainer

pytestmark = pytest.mark.slow

STEPS = 3
MAX_MODEL_LEN = 2048
SMALL = [
    *("model.dtype=fp32", "trainer.zero_stage=0", "scoring.num_workers=1", "run.console=false"),
    *("run.trackers=[]", "recipe.kl_coef=0.0", "trainer.learning_rate=1e-3"),
    *(f"trainer.max_steps={STEPS}", "checkpoint.export_at_end=true"),
]


def run_example(name: str, model: Path, run_dir: Path, *options: str) -> list[dict[str, float]]:
    """The metrics of each step of ``examples/NAME``, run with ``model``; verify finds no fault."""
    server_options = ["--num-threads", "1", "--max-model-len", str(MAX_MODEL_LEN)]
    with EmbeddedServerProcess(model, server_options) as server:
        command = [sys.executable, "-m", "easyrl.train", f"examples/{name}/config.yaml"]
        command += [f"run.output_dir={run_dir}", f"model.path={model}"]
        command += [f"inference.endpoints=[{server.url}]", *SMALL, *options]
        run_trainer(command)
    steps = [m for m in read_metrics(run_dir / "metrics.jsonl") if m["step"] > 0]
    assert [m["step"] for m in steps] == list(range(1, STEPS + 1))
    before, after = weights(model), weights(run_dir / "model")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    return steps


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def episodes_of(run_dir: Path) -> list[Completion]:
    """All that the journal has."""
    records = [
        decode_any(payload)
        for file in sorted((run_dir / "journal").rglob("*.journal"))
        for _, payload in list(read_records(file))[1:]
    ]
    groups = [record for record in records if isinstance(record, GroupRecord)]
    return [completion for group in groups for completion in group.completions]


def verified_counts(run_dir: Path) -> tuple[int, int]:
    """Episodes and turns, as ``easyrl verify`` counts them."""
    result = run_to_end([sys.executable, "-m", "easyrl", "verify", str(run_dir)])
    assert result.returncode == 0 and f"on-policy: {STEPS} batches" in result.stdout, result.stdout
    found = re.search(r"(\d+) episodes of (\d+) turns", result.stdout)
    assert found, result.stdout
    return int(found[1]), int(found[2])


def test_the_calculator_is_called_and_trains(tmp_path: Path) -> None:
    """The example's problems and tool; a model that has seen the calculator called and solves no
    problem, and so a reward of its own: the last message ends in an odd digit."""
    model, run_dir = tmp_path / "model", tmp_path / "run"
    build(model, calculations, num_steps=80, batch_size=8)
    (tmp_path / "odd.py").write_text(
        "def reward_func(prompt, texts, token_ids):\n"
        "    return [float(text[-1:] in set('13579')) for text in texts]\n"
    )
    steps = run_example(
        "calculator_tool",
        model,
        run_dir,
        *("rollout.max_tokens=32", "trainer.batch_size=4"),
        f"environments[0].rewards=[{{file: {tmp_path / 'odd.py'}}}]",
    )
    played = episodes_of(run_dir)
    turns = [len(c.episode.turns) for c in played if c.episode is not None]
    assert len(played) == len(turns) == STEPS * 4 * 8
    assert verified_counts(run_dir) == (len(turns), sum(turns))
    assert max(turns) > 1
    said = Counter[str]()
    for completion in played:
        assert completion.episode is not None and completion.episode.failure is None
        said.update(completion.episode.components)
        assert completion.episode.components["turns"] == len(completion.episode.turns)
    assert said["tool_calls"] > len(played) / 4
    assert said["tool_calls"] > said["tool_errors"] > 0
    assert sum(m["reward/mean"] > 0 for m in steps) == STEPS


def test_the_text_game_is_played_and_trains(tmp_path: Path) -> None:
    """With a model that has seen random games, and so finds the key now and then."""
    model, run_dir = tmp_path / "model", tmp_path / "run"
    build(model, random_games, num_steps=200, batch_size=2)
    steps = run_example("text_game", model, run_dir, "rollout.max_tokens=8", "trainer.batch_size=4")
    played = episodes_of(run_dir)
    assert len(played) == STEPS * 4 * 8
    turns = 0
    rewards = []
    for completion in played:
        episode = completion.episode
        assert episode is not None and episode.failure is None
        assert len(episode.turn_rewards) == len(episode.turns)
        assert [turn.parent for turn in episode.turns] == [None, *range(len(episode.turns) - 1)]
        turns += len(episode.turns)
        rewards.append(round(episode.reward, 6))
    assert verified_counts(run_dir) == (len(played), turns)
    assert {0.0, 0.3} <= set(rewards) <= {0.0, 0.3, 1.0}
    assert len({m["reward/mean"] for m in steps}) > 1


Pieces = list[tuple[str, bool]]  # texts, and whether the model says them


def build(
    output: Path,
    conversations: Callable[[random.Random], Iterator[Pieces]],
    num_steps: int,
    batch_size: int,
) -> None:
    """A model of the demo's size and tokenizer that has seen ``conversations``."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = model_config(tokenizer, tied=True)
    config.max_position_embeddings = MAX_MODEL_LEN
    model = Qwen3ForCausalLM(config)
    batches = encoded_batches(tokenizer, conversations(random.Random(0)), batch_size)
    train_and_save(model, tokenizer, batches, num_steps, output)


def calculations(rng: random.Random) -> Iterator[Pieces]:
    """The example's problems, each with a call of random numbers and a random digit behind it; one
    call in five is of a tool that there is not."""
    config = load_config(ROOT / "examples/calculator_tool/config.yaml")
    lines = (ROOT / "examples/calculator_tool/train.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    while True:
        a, b, operator = rng.randrange(1, 100), rng.randrange(1, 100), rng.choice("+-*")
        name = NO_TOOL if rng.random() < 0.2 else TOOL
        value = {"+": a + b, "-": a - b, "*": a * b}[operator]
        yield [
            (f"<|system|>{TOOL}({ARGUMENT})<|end|><|system|>{config.data.system_prompt}", False),
            (f"<|end|><|user|>{rng.choice(questions)}<|end|><|assistant|>", False),
            (f"{tool_call(name, f'{a}{operator}{b}')}<|end|>", True),
            (f"<|tool|>{value if name == TOOL else ERROR}<|end|><|assistant|>", False),
            (f"#### {rng.randrange(10)}<|end|>", True),
        ]


def random_games(rng: random.Random) -> Iterator[Pieces]:
    """Games of the example's houses, played at random."""
    lantern = _lantern()
    records = (ROOT / "examples/text_game/train.jsonl").read_text().splitlines()
    while True:
        record: dict[str, Any] = json.loads(rng.choice(records))
        game = lantern.Game(record["rooms"], record["start"], record["key"], record["door"])
        asked = f"{record['prompt']} {game.look()}"
        pieces = [(f"<|system|>{lantern.RULES}<|end|><|user|>{asked}<|end|>", False)]
        for _ in range(lantern.MOST_TURNS):
            command = rng.choice(("left", "right", "take", "open"))
            pieces += [("<|assistant|>", False), (f"{command}<|end|>", True)]
            pieces.append((f"<|user|>{game.play(command)[0]}<|end|>", False))
            if game.is_won:
                break
        yield pieces


def encoded_batches(
    tokenizer: PreTrainedTokenizerFast, conversations: Iterator[Pieces], batch_size: int
) -> Iterator[list[Rows]]:
    """The loss on what the model says."""
    while True:
        batch: list[Rows] = []
        for pieces in itertools.islice(conversations, batch_size):
            ids: list[int] = []
            labels: list[int] = []
            for text, is_said in pieces:
                own = tokenizer.encode(text, add_special_tokens=False)
                ids += own
                labels += own if is_said else [IGNORED] * len(own)
            batch.append({"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])})
        yield batch


def _lantern() -> Any:
    """The example's module."""
    spec = importlib.util.spec_from_file_location("lantern", ROOT / "examples/text_game/lantern.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lantern"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
