"""Whole runs of models of several families, with the embedded server: three steps, on-policy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.parts.random_model import write_prompts
from easyrl.config.file import load_config
from easyrl.demo.build_model import build_tokenizer
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.metrics.trackers import read_metrics
from tests.any_models import save_any_model
from tests.end_to_end.trainer_run import run_to_end, run_trainer, trainer_command

pytestmark = pytest.mark.slow

STEPS = 3
SETTINGS = [
    *("trainer.batch_size=4", "rollout.num_generations=4", "rollout.max_tokens=12"),
    *(f"trainer.max_steps={STEPS}", "trainer.learning_rate=1e-3", "recipe.kl_coef=0.01"),
    *("trainer.max_tokens_per_micro_batch=100", "checkpoint.export_at_end=true"),
]
SERVER = ["--max-model-len", "64", "--dtype", "float32"]


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        ("gpt2", "prompt"),
        ("gemma3_short_windows", "none"),
        ("short_windows", "none"),  # a Mistral
        ("phi", "prompt"),
        ("olmo", "prompt"),
    ],
)
def test_three_steps_on_policy(name: str, packing: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = save_any_model(tmp_path / "model", name, vocab_size=len(tokenizer), **ids)
    tokenizer.save_pretrained(model)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 4 * STEPS, 12)
    run_dir = tmp_path / "run"
    with EmbeddedServerProcess(model, SERVER) as server:
        said = run_trainer(trainer_command(run_dir, model, prompts, [server.url], *SETTINGS))
    steps = read_metrics(run_dir / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(STEPS + 1))
    assert ("goes through the model 4 times instead of once" in said) == (packing == "none")
    assert load_config(run_dir / "config.yaml").trainer.packing == packing
    verify = run_to_end([sys.executable, "-m", "easyrl", "verify", str(run_dir)])
    assert verify.returncode == 0, verify.stdout
    before, after = (AutoModelForCausalLM.from_pretrained(p) for p in (model, run_dir / "model"))
    changed = [
        not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)
    ]
    assert sum(changed) > len(changed) // 2
