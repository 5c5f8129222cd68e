"""Runs on records, as users start them: against plain Hugging Face loops, killed and resumed.

The loops know nothing of packing, shared prompts or late denominators: padded batches, labels of
-100, AdamW of torch.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import log_softmax, logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from easyrl.demo.build_model import IGNORED, build_tokenizer, model_config
from easyrl.demo.records import write_records
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.trainer_run import ROOT, run_to_end, start_ranks

BATCH, STEPS, RATE = 8, 6, 1e-3
TOLERANCE = 1e-5  # fp32, whose sums are taken in another order

# Sends its process a signal when it is asked about a record; the environment says which of both.
DEADLY = """
import os, signal
from dataclasses import dataclass
from easyrl.recipes import SFT

calls = 0

@dataclass(frozen=True)
class Deadly(SFT):
    def token_weights(self, group, run):
        global calls
        calls += 1
        if calls == int(os.environ.get("DIE_AT", "0")):
            os.kill(os.getpid(), signal.Signals[os.environ["DIE_BY"]])
        return super().token_weights(group, run)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained model and ``BATCH * STEPS`` records of each kind, at least."""
    folder = tmp_path_factory.mktemp("records")
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    Qwen3ForCausalLM(model_config(tokenizer, tied=True)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_records(folder, seed=0, num_train=150, num_heldout=30)
    (folder / "deadly.py").write_text(DEADLY)
    return folder


def command(inputs: Path, run_dir: Path, kind: str, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "easyrl", kind, f"configs/recipes/{kind}.yaml"),
        f"run.output_dir={run_dir}",
        f"model.path={inputs / 'model'}",
        f"data.files=[{inputs / f'{kind}.jsonl'}]",
        f"evaluation.data.files=[{inputs / f'{kind}-heldout.jsonl'}]",
        f"data.max_records={BATCH * STEPS}",
        f"trainer.batch_size={BATCH}",
        f"trainer.learning_rate={RATE}",
        "trainer.lr_schedule=constant",
        "trainer.max_grad_norm=0",
        "trainer.max_tokens_per_micro_batch=128",
        "checkpoint.every_steps=2",
        "evaluation.every_steps=4",
        "run.determinism=strict",
        *options,
    ]


def trained(command: list[str], **environment: str) -> str:
    result = run_to_end(command, **environment)
    assert result.returncode == 0, result.stdout[-3000:]
    return result.stdout


def verified(run_dir: Path) -> str:
    return trained([sys.executable, "-m", "easyrl", "verify", str(run_dir)])


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics of each optimizer step, evaluations merged in."""
    steps: dict[int, dict[str, Any]] = {}
    for line in read_metrics(run_dir / "metrics.jsonl"):
        steps.setdefault(int(line["step"]), {}).update(line)
    return [steps[number] for number in sorted(steps)]


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    (file,) = (run_dir / "model").glob("*.safetensors")
    return load_file(file)


def records_of(inputs: Path, name: str, count: int | None = None) -> list[dict[str, str]]:
    lines = (inputs / name).read_text().splitlines()
    return [json.loads(line) for line in lines[:count]]


def padded(tokenizer: Any, examples: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """Prompts and completions through the chat template; the loss on the completions alone."""
    rows = []
    for prompt, completion in examples:
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        start = len(
            tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        )
        rows.append((ids, [IGNORED] * start + ids[start:]))
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor(
            [[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]
        ),
        "labels": torch.tensor(
            [labels + [IGNORED] * (longest - len(labels)) for _, labels in rows]
        ),
    }


def optimizer_of(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-8, weight_decay=0.0)


@pytest.fixture(scope="module")
def sft(inputs: Path) -> Path:
    run_dir = inputs / "runs" / "sft"
    trained(command(inputs, run_dir, "sft", "data.shuffle=false"))
    return run_dir


def test_losses_and_weights_are_those_of_a_plain_loop(inputs: Path, sft: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    optimizer = optimizer_of(model)
    pairs = [(r["prompt"], r["completion"]) for r in records_of(inputs, "sft.jsonl", BATCH * STEPS)]
    held_out = [(r["prompt"], r["completion"]) for r in records_of(inputs, "sft-heldout.jsonl")]

    @torch.no_grad()
    def held_out_loss() -> float:
        return float(model(**padded(tokenizer, held_out)).loss)

    steps = steps_of(sft)
    assert [step["step"] for step in steps] == list(range(STEPS + 1))
    assert steps[0]["eval/loss"] == pytest.approx(held_out_loss(), abs=TOLERANCE)
    for number in range(STEPS):
        batch = padded(tokenizer, pairs[BATCH * number : BATCH * (number + 1)])
        loss = model(**batch).loss  # transformers' own, of the shifted labels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step = steps[number + 1]
        assert step["loss"] == pytest.approx(loss.item(), abs=TOLERANCE)
        assert step["batch/denominator"] == int((batch["labels"] != IGNORED).sum())
        assert 1 < step["batch/micro_batches"] < BATCH  # packed
        if "eval/loss" in step:
            assert step["eval/loss"] == pytest.approx(held_out_loss(), abs=TOLERANCE)
    assert [n for n, step in enumerate(steps) if "eval/loss" in step] == [0, 4, STEPS]
    assert steps[1]["loss"] > steps[STEPS]["loss"] + 0.1
    ours = weights_of(sft)
    for name, weight in model.state_dict().items():
        if name in ours:
            # Adam turns rounding in the smallest gradients into steps of the learning rate
            assert (ours[name] - weight).abs().mean() < TOLERANCE


def test_a_run_on_records_reports_nothing_of_rollouts(sft: Path) -> None:
    names = {name for step in steps_of(sft) for name in step}
    assert not [n for n in names if n.startswith("reward/") or "logprob" in n or "kl" in n]
    assert {"loss", "grad_norm", "learning_rate", "policy/entropy", "tokens/packed"} <= names
    assert (sft / "loss.png").is_file() and not (sft / "reward.png").exists()
    assert not (sft / "journal").exists()


def test_verify_says_that_each_record_was_trained_once(sft: Path) -> None:
    told = verified(sft)
    assert f"{BATCH * STEPS} records, each trained once, {STEPS} batches, complete" in told
    assert "on-policy" not in told and "certificate" in told


def test_verify_finds_records_that_were_changed(inputs: Path, sft: Path) -> None:
    file = inputs / "sft.jsonl"
    before = file.read_text()
    try:
        first = before.splitlines()[0]
        other = json.dumps(json.loads(first) | {"completion": "<think></think>1"})
        file.write_text(before.replace(first, other, 1))
        result = run_to_end([sys.executable, "-m", "easyrl", "verify", str(sft)])
    finally:
        file.write_text(before)
    assert result.returncode == 1
    assert "prompt 0 of epoch 0: was trained with tokens" in result.stdout


@pytest.mark.runs
def test_dpo_is_a_plain_loop_s(inputs: Path) -> None:
    run_dir = inputs / "runs" / "dpo"
    trained(command(inputs, run_dir, "dpo", "data.shuffle=false"))
    assert f"{BATCH * STEPS} records, each trained once" in verified(run_dir)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    reference = copy.deepcopy(model)
    optimizer = optimizer_of(model)

    def log_likelihood(policy: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = policy(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["labels"][:, 1:]
        logprobs = log_softmax(logits[:, :-1], -1).gather(-1, labels.clamp(min=0)[..., None])[
            ..., 0
        ]
        return (logprobs * (labels != IGNORED)).sum(-1)

    records = records_of(inputs, "dpo.jsonl", BATCH * STEPS)
    steps = steps_of(run_dir)
    for number in range(STEPS):
        own = records[BATCH * number : BATCH * (number + 1)]
        examples = [(r["prompt"], r[side]) for side in ("chosen", "rejected") for r in own]
        batch = padded(tokenizer, examples)
        with torch.no_grad():
            before = log_likelihood(reference, batch)
        rewards = 0.1 * (log_likelihood(model, batch) - before)
        margins = rewards[:BATCH] - rewards[BATCH:]
        loss = -logsigmoid(margins).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step = steps[number + 1]
        assert step["loss"] == pytest.approx(loss.item(), abs=TOLERANCE)
        assert step["policy/margin"] == pytest.approx(margins.mean().item(), abs=TOLERANCE)
        assert step["policy/chosen_reward"] == pytest.approx(
            rewards[:BATCH].mean().item(), abs=TOLERANCE
        )
        if number:  # at first all margins are zero but for rounding
            share = (margins > 0).float().mean().item()
            assert step["policy/accuracy"] == pytest.approx(share)
        assert step["batch/denominator"] == BATCH
    assert steps[STEPS]["policy/margin"] > 0.01
    assert 0 < steps[STEPS]["eval/loss"] < steps[0]["eval/loss"] == pytest.approx(0.6931, abs=1e-4)


def deadly(inputs: Path, run_dir: Path) -> list[str]:
    recipe = f"recipe={{file: {inputs / 'deadly.py'}, name: Deadly}}"
    options = [recipe, "evaluation=null", "checkpoint.background=false"]
    return command(inputs, run_dir, "sft", *options)


@pytest.fixture(scope="module")
def uninterrupted(inputs: Path) -> Path:
    run_dir = inputs / "runs" / "whole"
    trained(deadly(inputs, run_dir))
    return run_dir


@pytest.mark.runs
@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal", "status", "superseded"),
    [
        ("SIGKILL", -9, "1 line superseded"),  # goes on from step 2
        ("SIGTERM", 0, "0 lines superseded"),  # saves step 3
    ],
)
def test_an_interrupted_run_goes_on_to_the_same_bits(
    inputs: Path, uninterrupted: Path, signal: str, status: int, superseded: str
) -> None:
    run_dir = inputs / "runs" / signal
    # once in the trial of the recipe; in step 4, behind a checkpoint of step 2 and a third line
    third_of_step_4 = 1 + 3 * BATCH + 3
    ended = run_to_end(deadly(inputs, run_dir), DIE_AT=str(third_of_step_4), DIE_BY=signal)
    assert ended.returncode == status, ended.stdout[-3000:]
    told = verified(run_dir)
    assert f"{3 * BATCH} records, each trained once, of {BATCH * STEPS} in the data" in told
    assert "not complete" in told
    trained([*deadly(inputs, run_dir), "--resume"])
    told = verified(run_dir)
    assert f"{BATCH * STEPS} records, each trained once" in told and "complete" in told
    assert f"2 attempts, {superseded}" in told
    ours, theirs = weights_of(run_dir), weights_of(uninterrupted)
    assert all(ours[name].equal(theirs[name]) for name in theirs) and ours.keys() == theirs.keys()
    for one, other in zip(steps_of(uninterrupted), steps_of(run_dir), strict=True):
        for name in ("loss", "grad_norm", "policy/entropy", "tokens/packed"):
            assert one.get(name) == other.get(name), (one["step"], name)
    again = run_to_end([*deadly(inputs, run_dir), "--resume"])
    assert again.returncode == 0 and "is finished after 6 steps" in again.stdout


@pytest.mark.runs
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_train_what_one_does(inputs: Path, sft: Path, stage: int) -> None:
    run_dir = inputs / "runs" / f"two-{stage}"
    started = command(inputs, run_dir, "sft", "data.shuffle=false", f"trainer.zero_stage={stage}")
    ranks = start_ranks(started, inputs / f"two-{stage}.log", 2)
    statuses = [rank.wait(240) for rank in ranks]
    assert statuses == [0, 0], (inputs / f"two-{stage}.log").read_text()[-3000:]
    assert f"{BATCH * STEPS} records, each trained once" in verified(run_dir)
    for one, two in zip(steps_of(sft), steps_of(run_dir), strict=True):
        for name in ("loss", "eval/loss"):
            if name in one:
                assert one[name] == pytest.approx(two[name], abs=TOLERANCE)
        assert one.get("batch/denominator") == two.get("batch/denominator")


@pytest.mark.runs
@pytest.mark.parametrize(
    ("kind", "option", "problem"),
    [
        ("sft", "inference.endpoints=[http://127.0.0.1:1]", "inference: has no effect with source"),
        ("sft", "recipe={name: grpo}", "recipe.name: grpo trains on rollouts"),
        ("sft", "recipe={name: dpo}", "recipe dpo trains preference pairs, the records are of"),
        ("dpo", "recipe={name: sft}", "the records are preference pairs, of which recipe sft"),
        ("sft", "data.max_tokens=5", "no usable record is left, 48 are too_long"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    inputs: Path, tmp_path: Path, kind: str, option: str, problem: str
) -> None:
    result = run_to_end(command(inputs, tmp_path / "run", kind, option))
    assert result.returncode == 2 and problem in result.stdout, result.stdout[-3000:]
    assert "Traceback" not in result.stdout


def test_the_ready_files_are_the_commands_own() -> None:
    for kind in ("sft", "dpo"):
        assert (ROOT / "configs" / "recipes" / f"{kind}.yaml").is_file()
