"""``make demo``: builds a small model, serves it, trains it with GRPO, and measures what it learnt.

``--config`` names another run on the same task: ``configs/recipes`` has one for each recipe.
``--task tools`` is the demo whose model has a calculator, and whose samples are episodes.
``--engine vllm`` serves it with real vLLM, whose environment's interpreter is named by the
environment variable EASYRL_VLLM_PYTHON. ``--parallel tp2pp2`` splits it over four processes. The
last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import cast

CONFIGS = {"sums": "configs/demo.yaml", "tools": "configs/demo_tools.yaml"}


def main() -> int:
    arguments = _parse()
    # in order with the trainer's lines, in a log too
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    print(f"easyrl demo: {arguments.config}, {arguments.engine} server, into {arguments.run_dir}")
    if arguments.task == "tools":
        from easyrl.demo.tools.run import run_tools_demo

        return run_tools_demo(arguments)
    from easyrl.demo.run import run_demo  # behind the line: torch takes seconds

    return run_demo(arguments)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="easyrl.demo", description=__doc__)
    parser.add_argument("--task", choices=tuple(CONFIGS), default="sums")
    parser.add_argument("--config", type=Path, help="default: the task's")
    parser.add_argument("--run-dir", type=Path, help="default: runs/demo, of tools runs/demo-tools")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--num-servers", type=int, default=1)
    parser.add_argument("--parallel", metavar="LAYOUT", help="tp2pp2, tp2dp2, … default: 1 process")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    arguments = parser.parse_intermixed_args()
    if arguments.config is None:
        arguments.config = Path(CONFIGS[arguments.task])
    if arguments.run_dir is None:
        arguments.run_dir = Path("runs", Path(CONFIGS[arguments.task]).stem.replace("_", "-"))
    return arguments


if __name__ == "__main__":
    sys.exit(main())
