"""Tokens per second of the embedded server against ``transformers``' own batched ``generate``.

``python -m benchmarks.embedded_server [--sequences 8 64 256] [--prompts 0 128 1024] [--quick]``

A small random Qwen3, groups of 8 samples with a prompt each, and one row with a prompt for every
sample, where nothing is shared; every response has ``--response`` tokens (``min_tokens`` and
``max_tokens``), sampled at temperature 1 from the whole vocabulary, so that both sides do the same
work. No prompt comes twice, in no row or repeat. *Ours* is ``easyrl serve`` with one torch thread,
asked over HTTP (``/inference/v1/generate``, a request per group), from the first request to the
last response. *generate* gets all sequences as one batch in this process, with the faster one of
one and two threads (both are tried in the first repeat). A prompt of 0 is a single token: something
has to be decoded from. The sides take turns; seconds are medians over the repeats, of which rows
that take long get fewer.

Beside each row: the processor seconds of server and client, and the bound of one thread, tokens per
second if the model's forward passes were all there is to do (each prompt once, then one pass per
token without attention to anything before it). The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

from benchmarks.parts.embedded_server.sides import Generate, Seconds, Server, Work
from benchmarks.parts.random_model import write_random_model

GROUP_SIZE = 8
ONE_SAMPLE = (64, 128)  # sequences and prompt tokens of the row without groups
ROW_BUDGET_S = 45.0  # no further repeat of a row begins after this


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(
            Path(folder), hidden_size=arguments.hidden, num_layers=arguments.layers, weight_std=0.1
        )
        generate = Generate(model)
        with closing(Server(model, max(*arguments.sequences, ONE_SAMPLE[0]))) as server:
            asyncio.run(server.run(Work(1, GROUP_SIZE, 16, 8, seed=0)))  # warms up
            grid = [
                (num_sequences, prompt, GROUP_SIZE)
                for prompt in arguments.prompts
                for num_sequences in arguments.sequences
            ]
            rows = [
                measure(server, generate, number, *sizes, arguments)
                for number, sizes in enumerate([*grid, (*ONE_SAMPLE, 1)], 1)
            ]
    print(json.dumps({"rows": rows}))


def measure(
    server: Server,
    generate: Generate,
    number: int,
    num_sequences: int,
    prompt: int,
    num_samples: int,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    """Row ``number``, from 1, of groups of ``num_samples``; printed as well."""
    start_s = time.perf_counter()
    ours: list[Seconds] = []
    theirs: dict[int, list[float]] = {1: [], 2: []}
    for repeat in range(arguments.repeats):
        if repeat and time.perf_counter() - start_s > ROW_BUDGET_S:
            break
        num_groups, seed = num_sequences // num_samples, number * arguments.repeats + repeat
        work = Work(num_groups, num_samples, max(prompt, 1), arguments.response, seed)
        ours.append(asyncio.run(server.run(work)))
        for num_threads in theirs if repeat == 0 else [_faster(theirs)]:
            theirs[num_threads].append(generate.run(work, num_threads))
    num_threads = _faster(theirs)
    num_tokens = num_sequences * arguments.response
    ours_s = statistics.median(seconds.wall for seconds in ours)
    theirs_s = statistics.median(theirs[num_threads])
    row = {
        "sequences": num_sequences,
        "prompt": prompt,
        "samples": num_samples,  # per prompt
        "ours": round(num_tokens / ours_s),
        "generate": round(num_tokens / theirs_s),
        "ratio": round(theirs_s / ours_s, 2),
    }
    server_s = statistics.median(seconds.server for seconds in ours)
    client_s = statistics.median(seconds.client for seconds in ours)
    print(
        f"{num_sequences:4d} sequences, prompt {prompt:4d} of {num_samples}: "
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
