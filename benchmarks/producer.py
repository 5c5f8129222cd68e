"""What it costs to have many groups generated elsewhere, and what that costs the trainer beside it.

``python -m benchmarks.producer [--groups 10000] [--samples 2] [--tokens 128]``

Two scripted endpoints on loopback answer from bytes made beforehand. Three clients put the same
load on them, each in a process of its own, one after the other: EasyRL's producer (with scoring,
event log and checks), the ``openai`` async client and a thread pool with ``requests`` (both of
which only make arrays of token ids and log-probabilities). Then a training loop on a core of its
own runs with and without the producer beside it, at 5 groups of 16 samples of 1,000 tokens per
second. Servers are not counted. The last line printed is one JSON object.

``--base REV`` compares EasyRL's producer with that of another revision instead, checked out beside:
``--pairs`` runs of each, in turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.parts.producer.base import compare_with_base
from benchmarks.parts.producer.load import CpuMeter, Load, imbalance, peak_mb, servers
from benchmarks.parts.worktree import ROOT
from easyrl.runtime.machine import allow_open_files

SIDES = ("easyrl", "openai", "requests", "slowdown")


def main() -> None:
    arguments = _parse()
    if arguments.side is not None:
        print(json.dumps(_side(arguments)))
        return
    if arguments.base is not None:
        print(json.dumps(_against_base(arguments)))
        return
    results = {side: _run_side(side, sys.argv[1:]) for side in SIDES}
    ours = results["easyrl"]
    summary = {
        "groups_per_cpu_s": ours["groups_per_cpu_s"],
        "openai_groups_per_cpu_s": results["openai"]["groups_per_cpu_s"],
        "requests_groups_per_cpu_s": results["requests"]["groups_per_cpu_s"],
        "peak_mb": ours["peak_mb"],
        "imbalance": ours["imbalance"],
        "trainer_slowdown": results["slowdown"]["trainer_slowdown"],
    }
    print(json.dumps(summary))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=10_000, help="of each client")
    parser.add_argument("--samples", type=int, default=2, help="per group")
    parser.add_argument("--tokens", type=int, default=128, help="mean length of a response")
    parser.add_argument("--blocks", type=int, default=5, help="of windows off, on, on, off")
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--base", metavar="REV", help="only EasyRL's, against this revision's")
    parser.add_argument("--pairs", type=int, default=5, help="of runs, with --base")
    parser.add_argument("--side", choices=SIDES, help="only this one, in this process")
    return parser.parse_args()


def _against_base(arguments: argparse.Namespace) -> dict[str, object]:
    load = [f"--{name}={getattr(arguments, name)}" for name in ("groups", "samples", "tokens")]
    with tempfile.TemporaryDirectory() as folder:
        return compare_with_base(
            arguments.base,
            arguments.pairs,
            Path(folder),
            lambda name, checkout: _run_side("easyrl", load, checkout, name),
        )


def _run_side(
    side: str, options: Sequence[str], checkout: Path = ROOT, name: str | None = None
) -> dict:
    command = [sys.executable, "-m", "benchmarks.producer", "--side", side, *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=checkout)
    result = json.loads(done.stdout.splitlines()[-1])
    words = ", ".join(f"{k} {v:.4g}" for k, v in result.items())
    print(f"{name or side}: {words}", flush=True)
    return result


def _side(arguments: argparse.Namespace) -> dict[str, float]:
    if arguments.side == "slowdown":
        from benchmarks.parts.producer.slowdown import measure_slowdown

        return measure_slowdown(arguments.blocks, arguments.window_s)
    load = Load(arguments.groups, arguments.samples, 128, arguments.tokens)
    allow_open_files()
    with servers(load) as endpoints:
        urls = [endpoint.url for endpoint in endpoints]
        if arguments.side == "easyrl":
            return _easyrl(load, endpoints, urls)
        from benchmarks.parts.producer import clients

        run = {
            "openai": clients.run_openai,
            "requests": clients.run_requests,
        }[arguments.side]
        run(Load(16, load.num_samples, load.num_prompt_tokens, load.num_tokens), urls)
        meter, start_s = CpuMeter(endpoints), time.monotonic()
        run(load, urls)
        return _rates(load, time.monotonic() - start_s, meter.spent_s())


def _easyrl(load: Load, endpoints: list, urls: list[str]) -> dict[str, float]:
    from benchmarks.parts.producer.rollouts import producer, run_easyrl, wait_until_warm

    with (
        tempfile.TemporaryDirectory() as folder,
        producer(load, urls, Path(folder)) as (inference, rollouts),
    ):
        wait_until_warm(load, inference, rollouts)
        before_mb = peak_mb()
        meter, start_s = CpuMeter(endpoints), time.monotonic()
        run_easyrl(load, inference, rollouts)
        rates = _rates(load, time.monotonic() - start_s, meter.spent_s())
        memory = {"peak_mb": peak_mb(), "mb_before": before_mb}
        return rates | memory | {"imbalance": imbalance(endpoints)}


def _rates(load: Load, wall_s: float, cpu_s: dict[str, float]) -> dict[str, float]:
    num_requests = load.num_groups * load.num_samples
    total_s = sum(cpu_s.values())
    by_role = {f"{role}_us_per_request": 1e6 * s / num_requests for role, s in cpu_s.items() if s}
    return {
        "groups_per_s": load.num_groups / wall_s,
        "groups_per_cpu_s": load.num_groups / total_s,
        "cpu_us_per_request": 1e6 * total_s / num_requests,
        **by_role,
    }


if __name__ == "__main__":
    main()
