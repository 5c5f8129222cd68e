"""A short training whose figures are kept in ``golden.json``: what a refactoring must reproduce.

Fixed rollouts through packing, objective and ``DeepSpeedEngine``, in strict mode: two batches of
two updates each, with a reference and a clip that acts. Prints what it gives; ``--rewrite`` keeps
it, and what ``whole_run.py`` gives, after a change that is meant to change numbers:

    python -m tests.golden.golden_run --rewrite
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

GOLDEN = Path(__file__).with_name("golden.json")
NUM_BATCHES, UPDATES, GROUPS_PER_UPDATE = 2, 2, 3
MAX_TOKENS, MAX_ROW_TOKENS = 16, 60
CLIP = 0.01  # the second update's ratios lie on both sides of it
# Of a tensor's norm, on another processor. Measured (see comparison.py): 4e-8; the run moves the
# tensors by 3e-4 to 5e-3.
WEIGHTS_TOLERANCE = 1e-6
FIGURES = ("loss", "entropy", "kl", "ratio", "clip_low", "clip_high")  # sums of the objective


def write_model(folder: Path, *, seed: int, distance: float = 0.0) -> Path:
    """A small Qwen3 of numpy's random numbers; ``distance`` from the one without."""
    import torch
    from transformers import Qwen3ForCausalLM

    from tests.tiny_models import tiny_config

    model = Qwen3ForCausalLM(tiny_config("qwen3", tied=True))
    numbers, others = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            values = 2 * numbers.random(parameter.shape) - 1
            values += distance * (2 * others.random(parameter.shape) - 1)
            values *= 1.7 * parameter.shape[-1] ** -0.5
            values += 1.0 if parameter.ndim == 1 else 0.0  # the norms' weights
            parameter.copy_(torch.from_numpy(values))
    model.save_pretrained(folder)
    return folder


def configuration(folder: Path) -> Any:
    from easyrl.config.file import validate_config

    (folder / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    return validate_config(
        {
            "run": {"determinism": "strict"},
            "model": {"path": str(folder / "policy"), "dtype": "fp32", "logprob_chunk_size": 32},
            "data": {"files": [str(folder / "prompts.jsonl")]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "rollout": {"temperature": 0.8, "max_tokens": MAX_TOKENS},
            "recipe": {
                "aggregation": "token",
                "kl_coef": 0.1,
                "entropy_coef": 0.01,
                "clip_eps_low": CLIP,
                "clip_eps_high": CLIP,
            },
            "trainer": {
                "updates_per_batch": UPDATES,
                "batch_size": UPDATES * GROUPS_PER_UPDATE,
                "learning_rate": 3e-4,
                "lr_schedule": "cosine",
                "max_steps": NUM_BATCHES * UPDATES,
                # above the rounding of gradients, which Adam would make as large as any other
                "adam_eps": 1e-3,
                "max_grad_norm": 0.5,
                "weight_decay": 0.01,
            },
        }
    )


def train(folder: Path) -> dict[str, Any]:
    """The run: by step its loss and what the objective counted; the weights' digest and sketch."""
    from easyrl.engines.base import MetricSums
    from easyrl.engines.deepspeed.engine import DeepSpeedEngine
    from easyrl.inference_client.transfer.artifact import tensor_checksum
    from easyrl.models.loading import load_policy_model
    from easyrl.recipes.estimators import group_advantages
    from easyrl.runtime.determinism import make_deterministic
    from easyrl.runtime.numerics import arithmetic
    from tests.golden.comparison import sketch
    from tests.recipes import batch_denominator, pack_groups
    from tests.tiny_models import random_group

    config = configuration(folder)
    make_deterministic(config)
    policy = write_model(folder / "policy", seed=3)
    reference = write_model(folder / "reference", seed=3, distance=0.1)
    paths = iter((policy, reference, policy))  # in the order in which the engine asks
    engine = DeepSpeedEngine(
        config,
        load_model=lambda: load_policy_model(config.model.model_copy(update={"path": next(paths)})),
    )
    rng = np.random.default_rng(5)
    steps: list[dict[str, float]] = []
    for _ in range(NUM_BATCHES):
        engine.begin_batch()
        for _ in range(UPDATES):
            groups = [
                random_group(rng, int(rng.integers(2, 14)), rng.integers(1, 15, 4).tolist())
                for _ in range(GROUPS_PER_UPDATE)
            ]
            rows = pack_groups(
                groups,
                [group_advantages(group.rewards, "group_std") for group in groups],
                aggregation="token",
                max_tokens=MAX_TOKENS,
                mask_truncated=False,
                max_tokens_per_micro_batch=MAX_ROW_TOKENS,
            )
            assert len(rows) > 1
            counted = MetricSums()
            for row in rows:
                for sums in engine.forward_backward([row]):
                    counted.add(sums)
            denominator = batch_denominator(groups, "token", False)
            step = engine.optimizer_step(denominator)
            figures = {name: counted.sums[f"{name}_sum"] / denominator for name in FIGURES}
            steps.append(figures | {"grad_norm": step.grad_norm})
    weights = {name: value.clone() for name, value in engine.named_weights()}
    lines = [f"{name} {tensor_checksum(value)}\n" for name, value in weights.items()]
    return {
        "arithmetic": arithmetic(),
        "steps": steps,
        "weights": blake3("".join(sorted(lines)).encode()).hexdigest(),
        "sketch": sketch(weights.items()),
    }


def main() -> int:
    from tests.golden.whole_run import keep

    parser = argparse.ArgumentParser(description="The golden run.")
    parser.add_argument("--rewrite", action="store_true", help="keep what the two runs give now")
    arguments = parser.parse_args()
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.rewrite:  # first: its processes must not inherit a process group
            keep(Path(folder) / "whole")
        result = json.dumps(train(Path(folder)), indent=1)
    print(result)
    if arguments.rewrite:
        GOLDEN.write_text(result + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
