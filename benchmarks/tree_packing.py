"""Responses and prompts that begin alike: rows as prefix trees beside rows that share prompts only.

``python -m benchmarks.tree_packing [--repeats 3] [--attention auto] [--model tiny|0.6b]
[--device cpu|cuda] [--dtype fp32|bf16]``

Both sides pack the same groups, with planted beginnings in common, into one row, and compute the
loss that an engine trains with and its gradient in a Qwen3-shaped model with random weights. Before
the clock starts, loss and gradients of the two are compared, and the run fails if they are not the
same. The sides then take turns. ``token_ratio`` is prompt over tree in tokens that go through the
model, ``flop_ideal`` in floating-point operations (``parts.shared_prompt.flops`` says what is
counted; the projection to the vocabulary is for both that of all trained tokens), ``time_ratio``
the median over repeats in seconds. ``pack_ms`` is the time to build the tree's row. The last line
printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from benchmarks.parts.shared_prompt.flops import Work, counting, flops
from benchmarks.parts.shared_prompt.sizes import RECIPE, model_config
from benchmarks.parts.shared_prompt.timing import Disagreement, check, compare, seconds_in_turns
from benchmarks.parts.shared_prompt.workload import random_policy
from benchmarks.parts.tree_packing.groups import CASES, Planted, planted_groups
from easyrl.dataloaders.packing.groups import Packing, pack_groups
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.policy_model import PolicyModel
from easyrl.models.tri_model import TriModel
from easyrl.recipes import RunSettings
from easyrl.recipes.groups import trained_group
from easyrl.runtime.machine import pin_process, usable_cpus
from easyrl.schema import MicroBatch, RolloutGroup

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COLUMNS = (
    "P",
    "G",
    "R",
    "groups",
    "tokens_prompt",
    "tokens_tree",
    "token_ratio",
    "flop_ideal",
    "time_ratio",
    "pack_ms",
)
PACKINGS: tuple[Packing, ...] = ("prompt", "tree")


def main() -> None:
    arguments = _parse()
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    if device.type == "cpu":
        torch.set_num_threads(arguments.threads)
        pin_process(0, usable_cpus()[: arguments.threads])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = model_config(arguments.model)
    print(
        f"hidden {config.hidden_size}, {config.num_hidden_layers} layers, vocabulary "
        f"{config.vocab_size}, {arguments.dtype} on {device}, attention {arguments.attention}, "
        f"{torch.get_num_threads()} threads"
    )
    with tempfile.TemporaryDirectory(prefix="easyrl-tree-packing-") as folder:
        policy = random_policy(
            config, Path(folder), dtype=dtype, device=device, attention=arguments.attention
        )
    print("  ".join(f"{name:>13}" for name in COLUMNS) + "  shared", flush=True)
    rows = []
    for case in CASES:
        groups = planted_groups(case, config.vocab_size)
        try:
            row = _measure(case, groups, policy, device, dtype, arguments.repeats)
        except Disagreement as problem:
            sys.exit(f"{case}: {problem}")
        rows.append(row)
        print("  ".join(f"{row[name]:>13}" for name in COLUMNS) + f"  {row['shared']}", flush=True)
    print(json.dumps({"rows": rows}))


def _measure(
    case: Planted,
    groups: list[RolloutGroup],
    policy: PolicyModel,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
) -> dict[str, Any]:
    packed = {packing: packed_row(groups, packing) for packing in PACKINGS}
    pack_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        packed_row(groups, "tree")
        pack_s.append(time.perf_counter() - start)
    denominator = RECIPE.denominator(groups, _run(groups))
    sides = {name: _forward(policy, row, denominator, device) for name, row in packed.items()}
    check(compare(sides, policy, "prompt"), dtype)
    seconds = seconds_in_turns(sides, policy, device, repeats)
    work = {name: _work(row) for name, row in packed.items()}
    count = counting(same_pass=True, checkpointed=False)
    needed = {name: flops(work[name], policy.model.config, count) for name in packed}
    ratios = [a / b for a, b in zip(seconds["prompt"], seconds["tree"], strict=True)]
    return {
        "P": case.P,
        "G": case.G,
        "R": case.R,
        "groups": case.groups,
        "shared": case.shared,
        "tokens_prompt": work["prompt"].tokens,
        "tokens_tree": work["tree"].tokens,
        "token_ratio": round(work["prompt"].tokens / work["tree"].tokens, 3),
        "flop_ideal": round(needed["prompt"] / needed["tree"], 3),
        "time_ratio": round(statistics.median(ratios), 3),
        "pack_ms": round(1e3 * statistics.median(pack_s), 2),
        "seconds": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
    }


def packed_row(groups: list[RolloutGroup], packing: Packing) -> MicroBatch:
    """All groups in one row, advantages of a fixed kind."""
    trained = [
        trained_group(
            RECIPE, g, np.linspace(-1, 2, len(g.completions), dtype=np.float32), _run(groups)
        )
        for g in groups
    ]
    (row,) = pack_groups(trained, max_tokens_per_micro_batch=10**9, packing=packing)
    return row


def _run(groups: list[RolloutGroup]) -> RunSettings:
    longest = max(len(c.token_ids) for g in groups for c in g.completions)
    return RunSettings(longest, len(groups[0].completions), temperature=1.0, seed=0)


def _forward(
    policy: PolicyModel, row: MicroBatch, denominator: float, device: torch.device
) -> Callable[[], Tensor]:
    tri_model = TriModel(policy, reference=None, old_policy=None, temperature=1.0, device=device)

    def forward() -> Tensor:
        return tri_model.loss(row, RECIPE, same_pass=True)[0] / denominator

    return forward


def _work(row: MicroBatch) -> Work:
    layout = SegmentLayout(row.segments)
    return Work(layout.num_tokens, layout.num_pairs, row.num_loss_tokens)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--model", default="tiny", choices=("tiny", "0.6b", "4b"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="fp32", choices=tuple(DTYPES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
