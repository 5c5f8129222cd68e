"""Servers of the demo's model and trainers, each a process of its own, and what a run was like."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easyrl.demo.layouts import NamedLayout
from easyrl.demo.servers import SERVER_KEY, Cores, Engine, divided_cores, start_server
from easyrl.inference_client.api_keys import new_api_key
from easyrl.inference_client.servers.managed.server_process import ServerStartError
from easyrl.metrics.trackers import read_metrics
from easyrl.one_machine.launched_trainer import LaunchedTrainer
from easyrl.runtime.machine import pin_process
from easyrl.timeline.accounting import most_unexplained
from easyrl.timeline.accounts_file import read_accounts

PROOF_TIMES = ("time/proof_s", "time/canary_s", "time/probe_s")  # of what the endpoints serve
CERTIFICATE_TIMES = ("time/certificate_s", "time/journal_s")
SAMPLES_TIMES = ("time/samples_s",)
TIMELINE_TIMES = ("time/timeline_s",)


@dataclass(frozen=True)
class DemoServers:
    """Servers that are up, and how they share the machine with a trainer."""

    urls: Sequence[str]
    api_key: str
    cores: Cores


@contextmanager
def started_servers(
    engine: Engine, num_servers: int, model: Path, run_dir: Path
) -> Iterator[DemoServers]:
    """Servers of ``model`` whose logs are in ``run_dir``. Ends the process if one fails."""
    with ExitStack() as servers:
        urls, api_key = [], new_api_key()
        cores = servers.enter_context(divided_cores(engine, run_dir))
        for number in range(num_servers):
            log = run_dir / f"server-{number}.log"
            try:
                server = start_server(engine, model, cores, api_key, log)
            except (ValueError, ServerStartError) as error:
                sys.exit(f"easyrl demo: {error}")
            urls.append(servers.enter_context(server).url)
        print(f"{num_servers} {engine} server(s): {', '.join(urls)}")
        yield DemoServers(urls, api_key, cores)


def train(
    config: Path,
    overrides: Sequence[str],
    servers: DemoServers,
    *,
    layout: NamedLayout,
    grace_s: float,
) -> None:
    """A trainer through the ``deepspeed`` launcher. Ends the process if it fails."""
    command = [
        str(config),
        f"inference.endpoints=[{','.join(servers.urls)}]",
        f"inference.api_key_env={SERVER_KEY}",
        *overrides,
    ]
    cores = servers.cores
    with LaunchedTrainer(
        command,
        layout.num_processes,
        grace_s=grace_s,
        environment={SERVER_KEY: servers.api_key, **cores.environment},
    ) as trainer:
        if cores.of_trainer is not None:
            pin_process(trainer.process.pid, cores.of_trainer)
        status = trainer.wait()
    if status != 0:
        sys.exit(f"easyrl demo: the trainer ended with status {status}; see above")


def run_figures(run_dir: Path, seconds: float) -> dict[str, Any]:
    """Steps, groups and speed of a run that took ``seconds``, and what held its trainer up as
    shares of them: for the last line. ``unexplained_share``: of the time of the rank or endpoint
    whose account says least."""

    def share(times: Sequence[str]) -> float:
        return round(sum(m.get(key, 0.0) for m in metrics for key in times) / seconds, 4)

    metrics = read_metrics(run_dir / "metrics.jsonl")
    steps = [m for m in metrics if "time/step_s" in m]
    rates = sorted(m["throughput/tokens_per_s_per_device"] for m in steps)
    return {
        "steps": len(steps),
        "groups_drawn": int(sum(m["batch/groups_drawn"] for m in steps)),
        "groups_accepted": int(sum(m["batch/groups"] for m in steps)),
        "tokens_per_s_per_device": round(rates[len(rates) // 2], 1),
        "proof_share": share(PROOF_TIMES),
        "certificate_share": share(CERTIFICATE_TIMES),
        "samples_share": share(SAMPLES_TIMES),
        "timeline_share": share(TIMELINE_TIMES),
        "unexplained_share": round(
            most_unexplained(lane for batch in read_accounts(run_dir) for lane in batch.lanes), 4
        ),
        "run_dir": str(run_dir),
    }
