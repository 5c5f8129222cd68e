"""The tables of the paper on periodic asynchrony, measured: on a cluster, or small on this machine.

``python -m benchmarks.paper table1|table2|table3|startup|shared_prompt --cluster CLUSTER.yaml``
trains with the paper's settings on a cluster, of which configs/launch/paper_cluster.yaml is an
example; it is started on the first training host, and ``--out`` is on a disk that all share. With
``--small`` the same sides train a small random model here: generation on one core, training on the
other; table3 against endpoints and with micro-batches that sleep, as two cores do not become faster
by being more. Sides take turns, and ratios are medians over the repeats.

``tpspd``: tokens of the trained sequences, each with its prompt, per second and device of training
and inference. What ``ratio`` and ``bound`` are of says docs/paper.md. ``--baseline verl:LOGFILE``
(or ``trl:``) adds a row from the log of another trainer's run, not to table3 and startup. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.parts.paper.baseline import Baseline, read_baseline
from benchmarks.parts.paper.cluster import load_cluster
from benchmarks.parts.paper.cluster_bench import ClusterBench
from benchmarks.parts.paper.rows import as_text
from benchmarks.parts.paper.scripted_bench import DEVICES, ScriptedBench, sleeping_endpoints
from benchmarks.parts.paper.sides import Bench, in_turns
from benchmarks.parts.paper.small_bench import WORK, WORKLOADS, SmallBench
from benchmarks.parts.paper.tables import SCALING, TABLES, Table
from benchmarks.parts.random_model import write_prompts
from benchmarks.parts.scratch import scratch

SMALL_STEPS, SMALL_REPEATS = 2, 3


def main() -> None:
    arguments = _parse()
    table = TABLES[arguments.table]
    try:
        if arguments.baseline and table.no_baseline is not None:
            others = " or ".join(name for name, each in TABLES.items() if each.no_baseline is None)
            raise ValueError(
                f"--baseline: {arguments.table} has no row for another trainer's run, as "
                f"{table.no_baseline}; leave it out, or measure {others}"
            )
        baselines = [read_baseline(text, arguments.baseline_devices) for text in arguments.baseline]
        if arguments.small:
            _small(table, baselines, arguments)
        else:
            _on_cluster(table, baselines, arguments)
    except (ValueError, RuntimeError) as error:  # a ConfigError is a ValueError
        sys.exit(f"paper: {error}")


def _small(table: Table, baselines: list[Baseline], arguments: argparse.Namespace) -> None:
    num_steps = arguments.steps or SMALL_STEPS
    settings = tuple(arguments.set)
    with ExitStack() as opened:
        made = opened.enter_context(scratch("paper", keep=arguments.keep))
        bench: SmallBench | ScriptedBench
        if table is TABLES["table3"]:
            largest = max(side.devices or 0 for side in SCALING)
            urls = sleeping_endpoints(largest // DEVICES, opened)
            bench = ScriptedBench(made.folder, num_steps, urls, settings)
        else:
            work = WORKLOADS.get(arguments.table, WORK)
            bench = SmallBench(made.folder, work, num_steps, settings)
        bench.prepare()
        repeats = arguments.repeats or SMALL_REPEATS
        _measure(table, bench, baselines, repeats, made.folder)


def _on_cluster(table: Table, baselines: list[Baseline], arguments: argparse.Namespace) -> None:
    cluster = load_cluster(arguments.cluster)
    out = arguments.out.absolute() / arguments.table
    out.mkdir(parents=True, exist_ok=True)
    num_steps = arguments.steps or table.steps
    settings, prompts = tuple(arguments.set), out / "prompts.jsonl"
    if table.made_up_prompt_tokens is not None:
        settings = (f"data.files=[{prompts}]", *settings)
    bench = ClusterBench(cluster, table.config, num_steps, settings)
    for side in table.sides:  # all that is wrong is said before the first hour of training
        config = bench.checked(side, out / side.name)
    if table.made_up_prompt_tokens is not None:
        write_prompts(prompts, config.trainer.batch_size * num_steps, table.made_up_prompt_tokens)
    print(f"{cluster.devices} devices, {num_steps} steps a side; runs in {out}", flush=True)
    _measure(table, bench, baselines, arguments.repeats or 1, out)


def _measure(
    table: Table, bench: Bench, baselines: list[Baseline], repeats: int, folder: Path
) -> None:
    print(f"{table.about}{bench.note}; load {_load()}", flush=True)
    runs = in_turns(bench, table.sides, repeats, folder)
    own = {side.name for side in table.sides}
    rows = [
        replace(row, name=row.name + bench.note) if row.name in own else row
        for row in table.rows(runs, baselines)
    ]
    print(f"load {_load()}")
    print(as_text(rows))
    print(json.dumps({"rows": [row.as_json() for row in rows]}))


def _load() -> str:
    """Processes that ran or waited to, means of 1 and 5 minutes."""
    return "{:.1f}, {:.1f}".format(*os.getloadavg()[:2])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("table", choices=tuple(TABLES))
    parser.add_argument("--cluster", type=Path, metavar="CLUSTER.yaml")
    parser.add_argument("--small", action="store_true", help="on this machine, in minutes")
    parser.add_argument("--repeats", type=int, help="of each side; default 1, with --small 3")
    parser.add_argument("--steps", type=int, help="that are counted; default: the paper's")
    parser.add_argument(
        "--baseline", action="append", default=[], metavar="verl:LOGFILE", help="or trl:LOGFILE"
    )
    parser.add_argument("--baseline-devices", type=int, help="training and inference; of TRL's run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="key.path=value", help="of all sides' runs"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), help="on a cluster")
    parser.add_argument("--keep", action="store_true", help="leave the small runs' folders behind")
    arguments = parser.parse_args()
    if arguments.small == (arguments.cluster is not None):
        parser.error("give either --cluster CLUSTER.yaml or --small")
    for name in ("repeats", "steps", "baseline_devices"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: has to be positive, and is {value}")
    return arguments


if __name__ == "__main__":
    main()
