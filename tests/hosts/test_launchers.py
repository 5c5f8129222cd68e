"""A run on two trainer hosts and an inference host, started as the documentation says."""

from __future__ import annotations

from pathlib import Path

import pytest

from easyrl.metrics.trackers import read_metrics
from tests.hosts.cluster import RUN_S, Cluster, wait_for_ranks
from tests.hosts.documented import documented
from tests.hosts.events import trained

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]
NUM_PROMPTS = 12
OVER_SSH = "deepspeed --hostfile hosts --module"


def assert_whole_run(hosts: Cluster, run_dir: Path) -> None:
    assert "on-policy" in hosts.verify(run_dir)
    ranks = trained(run_dir)
    assert sorted(sum(ranks, [])) == list(range(NUM_PROMPTS))
    assert len(ranks) == 2 and all(ranks)
    metrics = read_metrics(run_dir / "metrics.jsonl")[1:]
    assert all(m["policy/logprob_diff_max"] < 1e-4 for m in metrics)


def test_over_ssh(hosts: Cluster) -> None:
    assert documented("README.md", OVER_SSH) == documented("docs/several_nodes.md", OVER_SSH)
    hosts.start_sshd()
    run_dir, log = hosts.folder / "ssh", hosts.folder / "ssh.log"
    command = hosts.command(OVER_SSH, run_dir, NUM_PROMPTS)
    process = hosts.start(hosts.trainers[0], command, log)
    assert process.wait(RUN_S) == 0, log.read_text()[-5000:]
    assert_whole_run(hosts, run_dir)


def test_one_command_on_each_host(hosts: Cluster) -> None:
    run_dir = hosts.folder / "each"
    wait_for_ranks(hosts.start_ranks(run_dir, NUM_PROMPTS), 0)
    assert_whole_run(hosts, run_dir)


def test_a_run_folder_of_each_host_is_refused(hosts: Cluster) -> None:
    run_dir, own = hosts.folder / "unshared", hosts.trainers[1]
    run_dir.mkdir()
    own.run("mount", "-t", "tmpfs", "tmpfs", str(run_dir))
    started = hosts.start_ranks(run_dir, NUM_PROMPTS)
    wait_for_ranks(started, 2)
    said = [log.read_text() for _, log in started]
    assert all("run.output_dir" in each and "rank 1 on train1" in each for each in said)
    assert not any("Traceback" in each for each in said)
