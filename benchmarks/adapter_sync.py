"""What a sync of an adapter costs beside one of the whole model, with real vLLM.

``python -m benchmarks.adapter_sync --python .venv-vllm/bin/python [--rows adapter merged]``

The same short run of a random Qwen3 with adapters, served by a vLLM that it starts itself, once for
each value of ``weight_sync.lora`` in ``--rows``: bytes that a version's artifact has, and medians
over the syncs behind the first (which has the probe, and of an adapter the proof of the model below
it) of the seconds in all and of those that the proof of the bits took. Each run verifies its own
certificate. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.parts.random_model import write_prompts, write_random_model
from benchmarks.parts.scratch import scratch
from benchmarks.parts.worktree import ROOT
from easyrl.metrics.trackers import read_metrics

CONFIG = ROOT / "benchmarks" / "overlap.yaml"
PLUGIN = ROOT / "inference_client" / "vllm_plugin"
ROWS = ("adapter", "merged")
SETTINGS = (
    "trainer.batch_size=4",
    "trainer.learning_rate=1e-3",
    "rollout.num_generations=4",
    "rollout.max_tokens=16",
    "data.max_prompt_tokens=32",
    "model.lora={rank: 8, alpha: 16.0}",
    "inference.endpoints=[]",
)


def main() -> int:
    arguments = _parse()
    rows = []
    with scratch("adapter-sync", keep=arguments.keep) as made:
        model = write_random_model(
            made.folder / "model", hidden_size=arguments.hidden_size, num_layers=arguments.layers
        )
        prompts = write_prompts(made.folder / "prompts.jsonl", 64, 16)
        for lora in arguments.rows:
            row = {"lora": lora} | measured(lora, model, prompts, made.folder / lora, arguments)
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()))
    print(json.dumps({"rows": rows}))
    return 0


def measured(
    lora: str, model: Path, prompts: Path, output: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Trains ``--steps`` steps and reads what their syncs cost. Exits if the run fails."""
    launch = {
        "engine": "vllm",
        "python": str(arguments.python.absolute()),
        "options": ["--max-model-len=512", "--max-num-seqs=16"],
        # this checkout's plugin, whichever is installed
        "env": {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PLUGIN)},
    }
    overrides = [
        *SETTINGS,
        f"weight_sync.lora={lora}",
        f"model.path={model}",
        f"data.files=[{prompts}]",
        f"run.output_dir={output}",
        f"trainer.max_steps={arguments.steps}",
        f"inference.launch={json.dumps(launch)}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    train = [sys.executable, "-m", "easyrl.train", str(CONFIG), *overrides]
    verify = [sys.executable, "-m", "easyrl", "verify", str(output)]
    for command in (train, verify):
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        if status != 0:
            sys.exit(f"{command[2]} ended with status {status}")
    syncs = [m for m in read_metrics(output / "metrics.jsonl") if "sync/bytes" in m]
    later = syncs[1:] or syncs
    return {
        "bytes": int(syncs[-1]["sync/bytes"]),
        "sync_s": round(statistics.median(m["time/sync_s"] for m in later), 3),
        "proof_s": round(statistics.median(m["time/proof_s"] for m in later), 3),
        "canary_mean": float(f"{max(m['sync/canary_mean'] for m in syncs):.1e}"),
        "syncs": len(syncs),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="of vLLM's environment")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="the runs' folders")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
