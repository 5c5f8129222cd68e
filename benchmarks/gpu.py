"""Training, weights and projection on one GPU, by row: ``make bench-gpu``.

``python -m benchmarks.gpu [--budget-s 450] [--again] [--smoke --output FILE]``

Each row runs in a process of its own with a time limit, so that a failure costs one row, and is
written to ``docs/benchmarks-gpu.json`` as soon as it is there, with its error where it has none. A
row begins only if its limit fits into what is left of ``--budget-s``, which so bounds the call; the
limits of all rows together are twice that. A second call goes on with the rows that are missing or
were skipped because a package was; ``--again`` repeats those that failed, too. The tables of
``docs/benchmarks.md`` are made from the file. Rows (``benchmarks.parts.gpu.rows``):

- ``training``: bf16 model of Qwen3's sizes with random weights, one packed row of a group (prompt
  1,024, 15 responses of 1,024), GRPO's loss; torch and transformers alone. Tokens per second are
  those of a forward and backward: of the row, and of its sequences with the prompt once for each.
  MFU counts nothing that is computed twice. Peak memory stands beside the documented bytes of
  weights, gradients and optimizer (``docs/memory.md``); the difference is activations.
- ``engine``: the same through ``DeepSpeedEngine``.
- ``weights``: the weights' way to the host, and to an artefact with its hashes.
- ``head``: the projection to the vocabulary with its gradients, by chunk size.

``--smoke`` runs tiny shapes through the same code on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_table import PAGE, RESULTS, ROOT, rendered, write_page
from benchmarks.parts.gpu.row import NO_DEVICE
from benchmarks.parts.gpu.rows import Row, rows_of

BUDGET_S = 450.0  # of one call: under eight minutes with start and table
ERROR_LETTERS = 2000  # of a row that failed: the end of what it said


class NoDevice(RuntimeError):
    """There is no CUDA device here."""


def measured(row: Row, limit_s: float, *, smoke: bool) -> dict[str, Any]:
    """``row`` in a process of its own, which is ended after ``limit_s``. Raises ``NoDevice``."""
    command = [sys.executable, "-m", "benchmarks.parts.gpu.row", row.name, *["--smoke"] * smoke]
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # with whatever it starts itself
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"status": "failed", "error": f"it took longer than {limit_s:.0f} s"}
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode == NO_DEVICE:
        raise NoDevice("there is no CUDA device; --smoke runs tiny shapes on a CPU")
    if process.returncode != 0:
        return {"status": "failed", "error": errors.strip()[-ERROR_LETTERS:] or "it was killed"}
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result | {"seconds": round(time.monotonic() - start, 1)}


def run(output: Path, *, budget_s: float, again: bool, smoke: bool) -> dict[str, Any]:
    """Measures what ``output`` lacks, as far as ``budget_s`` goes, and writes each row into it."""
    results: dict[str, Any] = {"rows": []}
    if output.exists():
        results = json.loads(output.read_text(encoding="utf-8"))
    deadline = time.monotonic() + budget_s
    for name, row in rows_of(smoke).items():
        known = {r["name"]: r["status"] for r in results["rows"]}
        wanted = {"skipped", "failed"} if again else {"skipped"}  # a package may be there by now
        if name in known and known[name] not in wanted:
            continue
        left_s = deadline - time.monotonic()
        if left_s < row.limit_s:
            print(f"{name}: no time left for it; call again", flush=True)
            continue
        print(f"{name} ...", end=" ", flush=True)
        result = {"name": name} | measured(row, row.limit_s, smoke=smoke)
        print(result["status"], result.get("error", ""), flush=True)
        results["rows"] = [r for r in results["rows"] if r["name"] != name] + [result]
        _write(results, output, smoke)
    return results


def _write(results: dict[str, Any], output: Path, smoke: bool) -> None:
    order = list(rows_of(smoke))
    results["rows"].sort(key=lambda r: order.index(r["name"]) if r["name"] in order else len(order))
    unfinished = output.with_name(f".{output.name}.part")
    unfinished.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    unfinished.rename(output)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    parser.add_argument("--again", action="store_true", help="repeat the rows that failed")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.smoke and arguments.output == RESULTS:
        parser.error("--smoke needs an --output of its own")
    try:
        results = run(
            arguments.output,
            budget_s=arguments.budget_s,
            again=arguments.again,
            smoke=arguments.smoke,
        )
    except NoDevice as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    if arguments.output == RESULTS:
        write_page(results, PAGE)
    print(rendered(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
