"""Memory that a split model's ranks need to send its weights.

``python -m benchmarks.split_sync [--tensor 2] [--pipeline 2]``

The processes of one copy of a model of some 45 million parameters (fp32, CPU, gloo) make its
weights ready to be sent in three ways, one after the other: *by_stage*, as a push does: each
pipeline stage on its first tensor rank, a parameter at a time; *by_head*: every parameter on the
head; *all_gather*: the whole model on every rank. Of each rank the largest resident set beyond
what it had is taken (the kernel's high-water mark). Files are not written: those are in shared
memory and belong to no rank. Beside it *swap_buffer*: what an allgather–swap (MindSpeed-RL, section
"Allgather–Swap Technique") allots, a temporary buffer for the gathered weights of all tensor ranks
of a stage, that is tensor ranks × the largest rank's weights.

The last line printed is one JSON object. Exit status 3 if a rank needs more than twice the largest
tensor to send by stage.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from safetensors import safe_open

from benchmarks.parts.rank_launch import run_on_ranks
from benchmarks.parts.split_sync.setting import write_model
from benchmarks.parts.worktree import ROOT
from easyrl.models.weight_files import weight_files

WORKER = ROOT / "benchmarks/parts/split_sync/worker.py"
SLACK = 4 * 2**20  # bytes: pages that the allocator keeps


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.split_sync", description=__doc__)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--pipeline", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/split_sync"), help="folder")
    arguments = parser.parse_args()
    folder: Path = arguments.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    model = write_model(folder)
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    size, log = arguments.tensor * arguments.pipeline, folder / "processes.log"
    given = [str(folder), str(arguments.tensor), str(arguments.pipeline)]
    if not run_on_ranks(WORKER, given, size, log):
        print(f"split_sync: failed, see {log}", file=sys.stderr)
        return 1
    measured = json.loads((folder / "peaks.json").read_text())
    whole, largest = _sizes(model)
    for name, peaks in measured["peaks"].items():
        told = "  ".join(f"{peak / 2**20:6.1f}" for peak in peaks)
        print(f"{name:11} MiB by rank: {told}")
    swap = arguments.tensor * max(measured["held"])
    print(
        f"the model {whole / 2**20:.1f} MiB, its largest tensor {largest / 2**20:.1f}, a rank's "
        f"share {max(measured['held']) / 2**20:.1f}, swap_buffer {swap / 2**20:.1f}"
    )
    worst = {name: max(peaks) for name, peaks in measured["peaks"].items()}
    result = {"model": whole, "largest_tensor": largest, **worst, "swap_buffer": swap}
    print(json.dumps(result))
    return 3 if worst["by_stage"] > 2 * largest + SLACK else 0


def _sizes(model: Path) -> tuple[int, int]:
    """Bytes of all tensors in the files, and of the largest."""
    sizes = []
    for path in weight_files(model):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                sizes.append(tensor.numel() * tensor.element_size())
    return sum(sizes), max(sizes)


if __name__ == "__main__":
    sys.exit(main())
