"""A run whose prompts have drawn values: other ones in each epoch, and the same when resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.config import DatasetConfig
from easyrl.dataloaders.prompts.dataset import PromptOrder, load_prompts
from easyrl.demo.build_model import build_tokenizer
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.trainer_run import run_to_end, run_trainer, trainer_command

pytestmark = pytest.mark.runs

BATCH, STEPS, SEED = 4, 4, 3  # two epochs
TEMPLATE = {
    "prompt_template": "{prompt}+{target_tokens}",
    "template_values": {"target_tokens": [4, 11, 120]},  # of one to three tokens
}
REWARDS = ", ".join(
    [
        "{name: length_target, kwargs: {alpha: 0.01}}",
        '{name: overlong, weight: 0.5, kwargs: {max_tokens: "${rollout.max_tokens}", buffer: 0.5}}',
        "{name: repetition, weight: 0.1, kwargs: {ngram_size: 2}}",
        "{name: repetition, weight: 0.1, log_as: triples, kwargs: {ngram_size: 3}}",
    ]
)


def command(run_dir: Path, model: Path, prompts: Path, url: str, *options: str) -> list[str]:
    values = TEMPLATE["template_values"]
    return trainer_command(
        run_dir,
        model,
        prompts,
        [url],
        *(f"run.seed={SEED}", "data.shuffle=true", f"trainer.batch_size={BATCH}"),
        *("rollout.num_generations=4", "rollout.max_tokens=12", "checkpoint.every_steps=1"),
        f"data.prompt_template='{TEMPLATE['prompt_template']}'",
        f"data.template_values={{target_tokens: {values['target_tokens']}}}",
        f"rewards=[{REWARDS}]",
        *options,
    )


@pytest.fixture(scope="module")
def runs(served, tmp_path_factory) -> Iterator[tuple[Path, list[dict], list[dict]]]:
    folder = tmp_path_factory.mktemp("template-values")
    prompts = write_prompts(folder / "prompts.jsonl", BATCH * STEPS // 2, 12)
    found = []
    whole, parts = folder / "whole", folder / "parts"
    run_trainer(command(whole, served.model, prompts, served.url, f"trainer.max_steps={STEPS}"))
    run_trainer(command(parts, served.model, prompts, served.url, "trainer.max_steps=1"))
    last = command(parts, served.model, prompts, served.url, f"trainer.max_steps={STEPS}")
    run_trainer([*last, "--resume"])
    for run_dir in (whole, parts):
        metrics = read_metrics(run_dir / "metrics.jsonl")
        found.append([each for each in metrics if "tokens/prompt" in each])
    yield prompts, *found


def test_the_prompts_are_those_of_the_seed_in_every_epoch(runs):
    file, whole, parts = runs
    data = DatasetConfig(files=[file], apply_chat_template=False, **TEMPLATE)
    order = PromptOrder(load_prompts(data, build_tokenizer(), seed=SEED), seed=SEED, epochs=2)
    lengths = [len(order.prompt(position).token_ids) for position in range(BATCH * STEPS)]
    expected = [sum(lengths[first : first + BATCH]) for first in range(0, len(lengths), BATCH)]
    assert [each["tokens/prompt"] for each in whole] == expected
    assert [each["tokens/prompt"] for each in parts] == expected
    assert sum(expected[:2]) != sum(expected[2:])  # other values in the second epoch


def test_every_reward_is_reported_by_itself(runs):
    _, whole, _ = runs
    weights = {"length_target": 1.0, "overlong": 0.5, "repetition": 0.1, "triples": 0.1}
    for metrics in whole:
        means = {name: metrics[f"reward/{name}/mean"] for name in weights}
        total = sum(weight * means[name] for name, weight in weights.items())
        assert metrics["reward/mean"] == pytest.approx(total, abs=1e-5)
        assert all(metrics[f"reward/{name}/std"] > 0 for name in ("length_target", "overlong"))
        assert means["length_target"] < 0 and -1 <= means["triples"] <= means["repetition"] + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["rewards=[{name: length_target, kwargs: {field: length}}]"],
            "rewards[0]: length_target cannot score ",
        ),
        (["rewards=[{name: overlong}]"], "rewards[0].kwargs: overlong takes "),
        (
            ["rewards=[{name: remote, timeout_s: 1, kwargs: {urls: ['http://127.0.0.1:9']}}]"],
            "rewards[0]: kwargs.urls: remote failed: no answer within 1 s",
        ),
    ],
)
def test_what_a_reward_cannot_use_ends_the_start(served, tmp_path, options, message):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8, 12)
    wrong = command(tmp_path / "run", served.model, prompts, served.url, *options)
    ended = run_to_end(wrong)
    assert ended.returncode == 2 and message in ended.stdout, ended.stdout[-2000:]
