"""A run on two trainer hosts and an inference host, started as the documentation says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from easyrl.metrics.trackers import read_metrics
from tests.hosts.cluster import RUN_S, Cluster, cluster, trained

pytestmark = pytest.mark.hosts
NUM_PROMPTS = 12
OVER_SSH = "deepspeed --hostfile hosts --module"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def assert_whole_run(hosts: Cluster, run_dir: Path) -> None:
    assert "on-policy" in hosts.verify(run_dir)
    ranks = trained(run_dir)
    assert sorted(sum(ranks, [])) == list(range(NUM_PROMPTS))
    assert len(ranks) == 2 and all(ranks)
    metrics = read_metrics(run_dir / "metrics.jsonl")[1:]
    assert all(m["policy/logprob_diff_max"] < 1e-4 for m in metrics)


def test_over_ssh(hosts: Cluster) -> None:
    hosts.start_sshd()
    run_dir, log = hosts.folder / "ssh", hosts.folder / "ssh.log"
    command = hosts.command(OVER_SSH, run_dir, NUM_PROMPTS)
    process = hosts.start(hosts.trainers[0], command, log)
    try:
        assert process.wait(RUN_S) == 0, log.read_text()[-5000:]
    finally:
        hosts.end_run()
    assert_whole_run(hosts, run_dir)


def test_one_command_on_each_host(hosts: Cluster) -> None:
    run_dir = hosts.folder / "each"
    logs = [hosts.folder / f"each-{host.name}.log" for host in hosts.trainers]
    processes = []
    for number, (host, log) in enumerate(zip(hosts.trainers, logs, strict=True)):
        beginning = f"deepspeed --hostfile hosts --no_ssh --node_rank {number} "
        command = hosts.command(beginning, run_dir, NUM_PROMPTS)
        processes.append(hosts.start(host, command, log))
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(RUN_S) == 0, log.read_text()[-5000:]
    finally:
        hosts.end_run()
    assert_whole_run(hosts, run_dir)
