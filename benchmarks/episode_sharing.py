"""Turns of episodes that share what stands before them: one tree beside rows without sharing.

``python -m benchmarks.episode_sharing [--repeats 3] [--samples 8] [--system 128] [--tokens 32]
[--attention auto] [--model tiny|0.6b]``

A group of G samples of one prompt; each sample is an episode of six turns: three in line, the third
asked again by its agent, which goes on from the second answer with two more. A turn samples
``--tokens`` tokens, the environment writes as many between two turns. Three sides compute the loss
that an engine trains with, and its gradient, of the same trained tokens in a Qwen3-shaped model
with random weights:

- ``tree``: all episodes in one row, everything that begins alike once;
- ``branches``: every branch by itself, all in one row without sharing;
- ``requests``: every request by itself with the whole prompt it was shown, as a trainer that does
  not know which turn continues which would have it, all in one row without sharing.

Before the clock starts, loss and gradients are compared with those of ``requests``, and the run
fails if they are not the same. The sides then take turns; a time is the median over repeats. Memory
is the process's highest resident set during one forward and backward, less what was resident before
and the bytes of the gradients: activations, most of all. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

from benchmarks.parts.shared_prompt.sizes import model_config
from benchmarks.parts.shared_prompt.timing import (
    Disagreement,
    check,
    compare,
    frozen_garbage,
    run,
    seconds_in_turns,
)
from benchmarks.parts.shared_prompt.workload import random_policy
from easyrl.dataloaders.packing.groups import Packing, pack_groups
from easyrl.episodes.turns import TurnRecord, episode_completion, recorded
from easyrl.models.policy_model import PolicyModel
from easyrl.models.tri_model import TriModel
from easyrl.recipes import GRPO, RunSettings
from easyrl.recipes.groups import trained_group
from easyrl.runtime.machine import pin_process, usable_cpus
from easyrl.schema import Completion, MicroBatch, Prompt, RolloutGroup, Score, VersionSpan

RECIPE = GRPO(kl_coef=0.0, aggregation="token")  # each trained token weighs the same on all sides
SIDES: tuple[str, ...] = ("tree", "branches", "requests")
NUM_TURNS = 6
CPU = torch.device("cpu")
VERSION = "benchmark:0:0"


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    pin_process(0, usable_cpus()[: arguments.threads])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = model_config(arguments.model)
    records = logged_turns(arguments.samples, arguments.system, arguments.tokens, config.vocab_size)
    rows = {side: row_of(side, records) for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="easyrl-episode-sharing-") as folder:
        policy = random_policy(
            config, Path(folder), dtype=torch.float32, device=CPU, attention=arguments.attention
        )
    sides = {side: _forward(policy, row) for side, row in rows.items()}
    try:
        check(compare(sides, policy, "requests"), torch.float32)
    except Disagreement as problem:
        sys.exit(str(problem))
    seconds = seconds_in_turns(sides, policy, CPU, arguments.repeats)
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    peaks = {side: _peak_bytes(forward, policy) for side, forward in sides.items()}
    result = {
        "turns": NUM_TURNS,
        "samples": arguments.samples,
        "trained_tokens": rows["tree"].num_loss_tokens,
        "tokens": {side: rows[side].num_tokens for side in SIDES},
        "seconds": {side: round(medians[side], 3) for side in SIDES},
        "peak_mib": {side: round(peaks[side] / 2**20, 1) for side in SIDES},
    }
    for side in SIDES[1:]:
        result[f"tokens_saved_{side}"] = _saved(rows["tree"].num_tokens, rows[side].num_tokens)
        result[f"time_saved_{side}"] = _saved(medians["tree"], medians[side])
        result[f"memory_saved_{side}"] = _saved(peaks["tree"], peaks[side])
    print(json.dumps(result))


def logged_turns(
    num_samples: int, num_system: int, num_tokens: int, vocab_size: int
) -> list[list[TurnRecord]]:
    """Six requests of each sample, as they were made, each by itself."""
    rng = np.random.default_rng(0)

    def drawn(length: int) -> np.ndarray:
        return rng.integers(3, vocab_size, length).astype(np.int32)

    system = drawn(num_system)

    def made(prompt: np.ndarray) -> TurnRecord:
        return TurnRecord(prompt, _sampled(drawn(num_tokens)))

    def next_prompt(before: TurnRecord) -> np.ndarray:
        said = before.completion.token_ids
        return np.concatenate([before.new_ids, said, drawn(num_tokens)])

    samples = []
    for _ in range(num_samples):
        one = made(system)
        two = made(next_prompt(one))
        three = made(next_prompt(two))
        again = made(three.new_ids)
        five = made(next_prompt(again))
        six = made(next_prompt(five))
        samples.append([one, two, three, again, five, six])
    return samples


def _as_one(requests: Sequence[TurnRecord]) -> list[TurnRecord]:
    """The same as turns of one episode."""
    records: list[TurnRecord] = []
    for each in requests:
        records.append(recorded(each.new_ids, each.completion, records))
    return records


def row_of(side: str, records: Sequence[Sequence[TurnRecord]]) -> MicroBatch:
    """All trained tokens in one row; the advantage of a token is its sample's on every side."""
    if side == "requests":
        completions = [episode_completion([one], "game", 0.0) for own in records for one in own]
        advantages = np.repeat(_advantages(len(records)), NUM_TURNS)
    else:
        completions = [episode_completion(_as_one(own), "game", 0.0) for own in records]
        advantages = _advantages(len(records))
    group = RolloutGroup(
        prompt=Prompt(index=0, token_ids=records[0][0].new_ids, text="", answer=None),
        completions=tuple(completions),
        scores=tuple(Score(0.0, {}) for _ in completions),
        policy_version=VERSION,
        dispatched_s=0.0,
        completed_s=0.0,
    )
    trained = trained_group(RECIPE, group, advantages, _run(len(completions)))
    packing: Packing = "tree" if side == "tree" else "none"
    (row,) = pack_groups([trained], max_tokens_per_micro_batch=10**9, packing=packing)
    return row


def _advantages(num_samples: int) -> np.ndarray:
    return np.linspace(-1, 2, num_samples, dtype=np.float32)


def _run(num_generations: int) -> RunSettings:
    return RunSettings(1, num_generations, temperature=1.0, seed=0)


def _sampled(token_ids: np.ndarray) -> Completion:
    return Completion(
        token_ids=token_ids,
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        finish_reason="stop",
        version_spans=(VersionSpan(VERSION, 0, len(token_ids)),),
        endpoint="",
        loss_mask=np.ones(len(token_ids), dtype=np.bool_),
    )


def _forward(policy: PolicyModel, row: MicroBatch) -> Callable[[], Tensor]:
    tri_model = TriModel(policy, reference=None, old_policy=None, temperature=1.0, device=CPU)

    def forward() -> Tensor:
        return tri_model.loss(row, RECIPE, same_pass=True)[0] / row.num_loss_tokens

    return forward


def _peak_bytes(forward: Callable[[], Tensor], policy: PolicyModel) -> int:
    """Resident at the peak of one forward and backward, beyond weights and gradients."""
    policy.zero_grad(set_to_none=True)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier sides have freed is not to be used again
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    with frozen_garbage():
        run(forward, policy)
    peak = _resident_bytes("VmHWM")
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    held = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    policy.zero_grad(set_to_none=True)
    return peak - before - held


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def _saved(tree: float, other: float) -> float:
    """The share of ``other`` that the tree does without."""
    return round(1 - tree / other, 3)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--system", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--model", default="tiny", choices=("tiny", "0.6b"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
