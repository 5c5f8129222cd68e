"""Forward and backward of a group that shares its prompt, beside four other ways, in one go.

``python -m benchmarks.shared_prompt [--repeats 3] [--shapes 512,8,64 1024,8,128]
[--model tiny|0.6b|4b] [--dtype fp32|bf16] [--device cpu|cuda] [--without trl,prefix_grouper]``

All sides compute GRPO's clipped loss of the same group of G responses of R tokens to a prompt of P,
and its gradient in the same Qwen3-shaped model with random weights, through the same chunked
projection to the vocabulary:

- ``ours``: one packed row, the prompt once, through the model and the loss that an engine trains
  with;
- (a) ``padded``: G sequences padded to the longest; (b) ``packed``: G sequences in one row; both
  with causal fused attention without a mask;
- (c) ``prefix_grouper``: PyPI's prefix-grouper over fused attention;
- (d) ``trl``: the loss computation of TRL's GRPOTrainer; ``trl_own_head``, an extra column, with
  TRL's own projection.

Before the clock starts, every side's loss and gradient are compared with those of (b), and the run
fails if they are not the same. The sides then take turns; a speed-up is the median over repeats of
the other's seconds over ours. ``flop_ideal`` is what the arithmetic of (b) and ours allows
(``parts.shared_prompt.flops`` says what is counted). Each side runs a group in one forward and
backward. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.parts.shared_prompt.flops import Work, counting, unshared
from benchmarks.parts.shared_prompt.ours import ours
from benchmarks.parts.shared_prompt.packed import packed
from benchmarks.parts.shared_prompt.padded import padded
from benchmarks.parts.shared_prompt.prefix_grouper import prefix_grouper
from benchmarks.parts.shared_prompt.report import OURS, PACKED, PEERS, make_row, table
from benchmarks.parts.shared_prompt.sizes import (
    LONG_SHAPES,
    MODELS,
    SHAPES,
    Shape,
    model_config,
    random_batch,
)
from benchmarks.parts.shared_prompt.timing import (
    CLOCKS,
    Disagreement,
    check,
    compare,
    matrix_product_flops,
    seconds_in_turns,
)
from benchmarks.parts.shared_prompt.trl import trl, trl_own_head
from benchmarks.parts.shared_prompt.workload import Side, Workload, random_policy, workload
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.runtime.machine import pin_process, usable_cpus

SIDES: dict[str, Side] = {
    OURS: ours,
    "padded": padded,
    PACKED: packed,
    "prefix_grouper": prefix_grouper,
    "trl": trl,
    "trl_own_head": trl_own_head,
}
PACKAGES = {"prefix_grouper": "prefix_grouper", "trl": "trl", "trl_own_head": "trl"}


def main() -> None:
    arguments = _parse()
    sides = _sides(arguments.without)
    device, dtype = _device_and_dtype(arguments)
    if device.type == "cpu":
        torch.set_num_threads(arguments.threads)
        pin_process(0, usable_cpus()[: arguments.threads])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = model_config(arguments.model)
    shapes = arguments.shapes or (SHAPES if arguments.model == "tiny" else LONG_SHAPES)
    print(_sizes(arguments, config, device, dtype), flush=True)
    clock = CLOCKS[arguments.clock]
    peak = matrix_product_flops(device, dtype, clock)
    print(f"a large matrix product: {peak / 1e12:.4g} TFLOP/s", flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="easyrl-shared-prompt-") as folder:
        policy = random_policy(
            config,
            Path(folder),
            dtype=dtype,
            device=device,
            attention=arguments.attention,
            activation_checkpointing=arguments.checkpoint,
        )
    same_pass = arguments.head == "same_pass"
    count = counting(same_pass=same_pass, checkpointed=arguments.checkpoint == "layer")
    for shape in shapes:
        batch = random_batch(shape, config.vocab_size, ragged=arguments.ragged)
        work = workload(policy, batch, device, same_pass=same_pass)
        try:
            seconds, errors = measure(work, sides, arguments.repeats, dtype, clock)
        except Disagreement as problem:
            sys.exit(f"{tuple(shape)}: {problem}")
        layout = SegmentLayout(batch.micro_batch.segments)
        trained = batch.micro_batch.num_loss_tokens
        rows.append(
            make_row(
                shape,
                Work(layout.num_tokens, layout.num_pairs, trained),
                unshared(batch.lengths, trained),
                config,
                count,
                seconds,
                errors,
                peak,
            )
        )
        print(table(rows[-1:]), flush=True)
        errors_told = ", ".join(f"{n} {e[0]:.1e}/{e[1]:.1e}" for n, e in errors.items())
        print(
            f"seconds {rows[-1]['seconds']}; loss/gradient errors against (b): {errors_told}",
            flush=True,
        )
    print(table(rows))
    print(json.dumps({"rows": rows}))


def measure(
    work: Workload,
    sides: dict[str, Side],
    repeats: int,
    dtype: torch.dtype,
    clock: Callable[[], float],
) -> tuple[dict[str, list[float]], dict[str, tuple[float, float]]]:
    """Seconds and errors of each side that fits into memory; raises ``Disagreement``."""
    prepared = {name: side(work) for name, side in sides.items()}
    errors = compare(prepared, work.policy, PACKED)
    check(errors, dtype)
    fits = {name: prepared[name] for name in sides if name in errors}
    return seconds_in_turns(fits, work.policy, work.device, repeats, clock), errors


def _sides(without: list[str]) -> dict[str, Side]:
    sides = {
        name: side
        for name, side in SIDES.items()
        if name not in without and PACKAGES.get(name) not in without
    }
    missing = sorted({PACKAGES[n] for n in sides if n in PACKAGES and not find_spec(PACKAGES[n])})
    if missing:
        names = ",".join(missing)
        sys.exit(
            f"not installed: {names}; install with pip install -e '.[bench]', or leave the columns "
            f"empty with --without {names}"
        )
    return sides


def _device_and_dtype(arguments: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: there is no CUDA device")
    name = arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")
    return device, {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


def _sizes(
    arguments: argparse.Namespace, config: Any, device: torch.device, dtype: torch.dtype
) -> str:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "intermediate_size", "vocab_size")
    sizes = ", ".join(f"{name} {getattr(config, name)}" for name in names)
    where = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"{arguments.threads} threads"
    )
    return (
        f"Qwen3, {sizes}; {dtype} on {device.type} ({where}); our attention {arguments.attention}, "
        f"chunked projection {arguments.head} on all sides, activation checkpointing "
        f"{arguments.checkpoint}, {'ragged' if arguments.ragged else 'equal'} lengths, "
        f"{arguments.repeats} repeats, {arguments.clock} time; torch {torch.__version__}"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", metavar="P,G,R")
    parser.add_argument("--ragged", action="store_true", help="responses of R/2 to R tokens")
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="default: bf16 on a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument(
        "--clock",
        choices=tuple(CLOCKS),
        default="wall",
        help="processor: seconds of this process, on a CPU that others use; best with --threads 1",
    )
    parser.add_argument("--attention", default="auto", help="ours; as model.attention of a run")
    parser.add_argument("--head", choices=("same_pass", "recompute"), default="same_pass")
    parser.add_argument("--checkpoint", choices=("none", "layer"), default="none")
    parser.add_argument(
        "--without", type=lambda names: names.split(","), default=[], help=", ".join(PEERS)
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
