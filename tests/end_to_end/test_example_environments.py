"""The examples of environments as whole runs of a few steps: trained, on-policy, turns counted."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from easyrl.demo.build_model import IGNORED, Rows, model_config, train_and_save
from easyrl.demo.tools.build_model import build_model, build_tokenizer
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.ledger.journal.codec import GroupRecord, decode_any
from easyrl.ledger.journal.record_file import read_records
from easyrl.metrics.trackers import read_metrics
from easyrl.schema import Completion
from tests.end_to_end.trainer_run import ROOT, run_to_end, run_trainer

pytestmark = pytest.mark.runs

STEPS = 3
MAX_MODEL_LEN = 1024
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
    """The example's word problems and tool; the demo's model, which knows how to call and cannot
    solve one, is rewarded for a last message that ends in an odd digit."""
    model, run_dir = tmp_path / "model", tmp_path / "run"
    build_model(model, num_steps=150)
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
    """With a model that has seen random games, and so wins one now and then."""
    model, run_dir = tmp_path / "model", tmp_path / "run"
    build_player(model)
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


def build_player(output: Path) -> None:
    """A model that answers with a command, whichever."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = model_config(tokenizer, tied=True)
    config.max_position_embeddings = MAX_MODEL_LEN
    model = Qwen3ForCausalLM(config)
    train_and_save(model, tokenizer, random_games(tokenizer), 60, output)


def random_games(tokenizer: PreTrainedTokenizerFast) -> Iterator[list[Rows]]:
    """Batches of one game each, the loss on the player's commands."""
    lantern = _lantern()
    records = (ROOT / "examples/text_game/train.jsonl").read_text().splitlines()
    rng = random.Random(0)
    while True:
        record: dict[str, Any] = json.loads(rng.choice(records))
        game = lantern.Game(record["rooms"], record["start"], record["key"], record["door"])
        texts = [f"<|system|>{lantern.RULES}<|end|><|user|>{record['prompt']} {game.look()}<|end|>"]
        for _ in range(lantern.MOST_TURNS):
            command = rng.choice(("left", "right", "take", "open"))
            texts += ["<|assistant|>", f"{command}<|end|>"]
            texts.append(f"<|user|>{game.play(command)[0]}<|end|>")
            if game.is_won:
                break
        ids, labels = [], []
        for text in texts:
            own = tokenizer.encode(text, add_special_tokens=False)
            ids += own
            labels += own if text[0] != "<" else [IGNORED] * len(own)
        yield [{"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}]


def _lantern() -> Any:
    """The example's module."""
    spec = importlib.util.spec_from_file_location("lantern", ROOT / "examples/text_game/lantern.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lantern"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
