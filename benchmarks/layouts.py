"""Models that are split over processes, against the same model in one.

``python -m benchmarks.layouts [--only tp2 pp2] [--out DIR] [--break TRAP]``

Each layout is launched by ``deepspeed`` on CPU processes over gloo: random Qwen3 models with tied
and untied embeddings, ragged groups packed several to a row, GRPO with a KL term to another
reference, two updates on a batch. It is compared with plain Hugging Face models in fp64, each
sequence on its own: log-probabilities (largest difference), each parameter's gradient after the
clip (relative, worst), the norm before the clip (relative, worst update), and the weights after two
steps of AdamW (largest difference).

``--break`` plants a mistake that would give wrong numbers in silence, and has to end with status 3.
The last line printed is one JSON object. Exit status 3: an error above its limit; 1: a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.parts.layouts.cases import Case, cases, write_models
from benchmarks.parts.layouts.gold import gold
from benchmarks.parts.layouts.traps import TRAP, TRAPS
from benchmarks.parts.rank_launch import run_on_ranks
from benchmarks.parts.worktree import ROOT

LIMITS = {
    "fp32": {
        "logprob_err": 1e-5,
        "grad_err": 1e-4,
        "grad_norm_err": 1e-4,
        "step2_err": 1e-5,
    },
    "bf16": {"grad_norm_err": 0.02},
}
ERRORS = ("logprob_err", "grad_err", "grad_norm_err", "step2_err")
WORKER = ROOT / "benchmarks/parts/layouts/worker.py"


def main() -> int:
    names = list(dict.fromkeys(case.name for case in cases()))
    parser = argparse.ArgumentParser(prog="benchmarks.layouts", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("runs/layouts"), help="folder")
    parser.add_argument(
        "--break",
        dest="trap",
        choices=TRAPS,
        help="plant a mistake; only a layout in which it has to show is run",
    )
    arguments = parser.parse_args()
    if arguments.trap:
        os.environ[TRAP] = arguments.trap
        arguments.only = [TRAPS[arguments.trap][1]]
    folder: Path = arguments.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").unlink(missing_ok=True)
    write_models(folder)
    for tied, name in ((True, "tied"), (False, "untied")):
        torch.save(tuple(gold(folder, tied)), folder / f"gold-{name}.pt")
    chosen = [case for case in cases() if case.name in arguments.only]
    for world_size in sorted({case.layout.world_size for case in chosen}):
        launch(folder, [case for case in chosen if case.layout.world_size == world_size])
    rows = read_rows(folder)
    for row in rows:
        print(told(row))
    print(json.dumps({"layouts": rows}))
    if len(rows) < len(chosen):
        print(f"layouts: {len(chosen) - len(rows)} cases failed", file=sys.stderr)
        return 1
    return 3 if any(problems(row) for row in rows) else 0


def launch(folder: Path, some: list[Case]) -> None:
    """All cases of one number of processes; output goes to ``FOLDER/N-processes.log``."""
    size = some[0].layout.world_size
    names = list(dict.fromkeys(case.name for case in some))
    log = folder / f"{size}-processes.log"
    if not run_on_ranks(WORKER, [str(folder), *names], size, log):
        print(f"layouts: {' '.join(names)}: failed, see {log}", file=sys.stderr)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "rows.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def problems(row: dict[str, Any]) -> list[str]:
    """What is above its limit."""
    limits = LIMITS[row["dtype"]]
    found = [
        f"{name} {row[name]:.1e} > {most:.0e}"
        for name, most in limits.items()
        if not row[name] <= most
    ]
    if row["params_compared"] != row["params_total"]:
        found.append(f"{row['params_compared']} of {row['params_total']} parameters")
    return found


def told(row: dict[str, Any]) -> str:
    errors = "  ".join(f"{name.removesuffix('_err')} {row[name]:.1e}" for name in ERRORS)
    kind = f"{row['dtype']} {'tied' if row['tied'] else 'untied'}"
    return f"{row['name']:16} {kind:12} {errors}  {'; '.join(problems(row))}"


if __name__ == "__main__":
    sys.exit(main())
