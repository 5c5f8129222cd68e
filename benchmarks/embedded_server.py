"""Tokens per second of the embedded server against ``transformers``' own batched ``generate``.

``python -m benchmarks.embedded_server [--sequences 8 64 256] [--prompts 0 128 1024] [--quick]``

A small random Qwen3, groups of 8 samples with a prompt each. More rows: one with a prompt for every
sample, where nothing is shared; and two of mixed lengths, where 4 of 64 prompts have 1,024 tokens,
every sixteenth from the first on, and the others 32, with a sample each and with 8. Every response
has ``--response`` tokens (``min_tokens`` and ``max_tokens``), sampled at temperature 1 from the
whole vocabulary, so that both sides do the same work. No prompt comes twice, in no row or repeat.
*Ours* is ``easyrl serve`` with one torch thread, asked over HTTP (``/inference/v1/generate``, a
request per group), from the first request to the last response. *generate* gets all sequences as
one batch in this process, with the faster one of one and two threads (both are tried in the first
repeat); of mixed lengths a batch for each, one behind the other, as padding 60 prompts to 1,024
tokens costs several times as much. A prompt of 0 is a single token: something has to be decoded
from. The server has a place for each sequence of the largest row of groups, so that of
the 512 of mixed lengths half wait. The sides take turns; seconds are medians over the repeats, of
which rows that take long get fewer.

Beside each row: the processor seconds of server and client, and the bound of one thread, tokens per
second if the model's forward passes were all there is to do (each prompt once, then one pass per
token without attention to anything before it). The last line printed is one JSON object,
``{"rows": [{"sequences", "prompt", "ours", "generate", "ratio", "samples"}, …]}``: tokens per
second, and samples of a prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from benchmarks.parts.embedded_server.sides import Generate, Seconds, Server, Work
from benchmarks.parts.random_model import write_random_model

GROUP_SIZE = 8
ONE_SAMPLE = (64, 128)  # sequences and prompt tokens of the row without groups
MIXED = ((1024, *(32,) * 15) * 4, "60 of 32, 4 of 1024")  # tokens of each prompt, and in words
ROW_BUDGET_S = 45.0  # no further repeat of a row begins after this


class Case(NamedTuple):
    """What a row is of."""

    prompts: tuple[int, ...]  # tokens of each
    num_samples: int  # of a prompt
    prompt: int | str  # as the row says it

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_samples


def cases(sequences: Sequence[int], prompts: Sequence[int]) -> list[Case]:
    """Of all rows: groups, one without them, and mixed lengths."""
    grid = [
        Case((max(prompt, 1),) * (number // GROUP_SIZE), GROUP_SIZE, prompt)
        for prompt in prompts
        for number in sequences
    ]
    number, prompt = ONE_SAMPLE
    lengths, words = MIXED
    mixed = [Case(lengths, num_samples, words) for num_samples in (1, GROUP_SIZE)]
    return [*grid, Case((prompt,) * number, 1, prompt), *mixed]


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(
            Path(folder), hidden_size=arguments.hidden, num_layers=arguments.layers, weight_std=0.1
        )
        generate = Generate(model)
        with closing(Server(model, max(*arguments.sequences, ONE_SAMPLE[0]))) as server:
            asyncio.run(server.run(Work((16,), GROUP_SIZE, 8, seed=0)))  # warms up
            rows = [
                measure(server, generate, number, case, arguments)
                for number, case in enumerate(cases(arguments.sequences, arguments.prompts), 1)
            ]
    print(json.dumps({"rows": rows}))


def measure(
    server: Server,
    generate: Generate,
    number: int,
    case: Case,
    arguments: argparse.Namespace,
) -> dict[str, float | str]:
    """Row ``number``, from 1; printed as well."""
    start_s = time.perf_counter()
    ours: list[Seconds] = []
    theirs: dict[int, list[float]] = {1: [], 2: []}
    for repeat in range(arguments.repeats):
        if repeat and time.perf_counter() - start_s > ROW_BUDGET_S:
            break
        seed = number * arguments.repeats + repeat
        work = Work(case.prompts, case.num_samples, arguments.response, seed)
        ours.append(asyncio.run(server.run(work)))
        for num_threads in theirs if repeat == 0 else [_faster(theirs)]:
            theirs[num_threads].append(generate.run(work, num_threads))
    num_threads = _faster(theirs)
    num_tokens = case.num_sequences * arguments.response
    ours_s = statistics.median(seconds.wall for seconds in ours)
    theirs_s = statistics.median(theirs[num_threads])
    row: dict[str, float | str] = {
        "sequences": case.num_sequences,
        "prompt": case.prompt,
        "ours": round(num_tokens / ours_s),
        "generate": round(num_tokens / theirs_s),
        "ratio": round(theirs_s / ours_s, 2),
        "samples": case.num_samples,  # of a prompt
    }
    server_s = statistics.median(seconds.server for seconds in ours)
    client_s = statistics.median(seconds.client for seconds in ours)
    print(
        f"{case.num_sequences:4d} sequences, prompt {case.prompt:>4} of {case.num_samples}: "
        f"ours {row['ours']} tokens/s ({ours_s:.2f} s; processor: server {server_s:.2f} s, "
        f"client {client_s:.2f} s), "
        f"generate {row['generate']} tokens/s ({theirs_s:.2f} s, {num_threads} threads), "
        f"ratio {row['ratio']}, bound {num_tokens / generate.forwards_s(work):.0f} tokens/s, "
        f"{len(ours)} repeats",
        flush=True,
    )
    return row


def _faster(seconds: dict[int, list[float]]) -> int:
    """Number of threads; the first repeat has tried them all."""
    return min(seconds, key=lambda num_threads: seconds[num_threads][0])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--prompts", type=int, nargs="+", default=[0, 128, 1024], help="tokens")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=128, help="size of the model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="16 tokens, one repeat, no 256")
    arguments = parser.parse_args()
    if any(number % GROUP_SIZE for number in arguments.sequences):
        parser.error(f"--sequences: must be multiples of {GROUP_SIZE}, the size of a group")
    if arguments.quick:
        arguments.response, arguments.repeats = 16, 1
        arguments.sequences = [number for number in arguments.sequences if number <= 64]
    return arguments


if __name__ == "__main__":
    main()
