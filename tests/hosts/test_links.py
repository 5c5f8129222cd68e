"""A host's link is cut in mid-batch: nothing is lost, and what has to end does so in time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.golden.whole_run import outcome
from tests.hosts.cluster import Cluster, wait_for_ranks
from tests.hosts.events import num_events, trained, wait_for_open_batch

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]
NUM_PROMPTS, BATCH = 16, 8
DOWN_S = 20.0
PEER_TIMEOUT_S = 10.0
MARGIN_S = 45.0  # until both have unwound
OPTIONS = [f"trainer.batch_size={BATCH}", "rollout.num_generations=8", "rollout.max_tokens=40"]
STRICT = [
    *("run.determinism=strict", "checkpoint.every_steps=1", "checkpoint.export_at_end=true"),
    *("run.name=strict", f"watchdog.peer_timeout_s={PEER_TIMEOUT_S}"),
]


def attempts(run_dir: Path) -> int:
    return json.loads((run_dir / "attempt.json").read_text())["attempt"] + 1


def test_the_inference_host_is_cut_off_for_a_while(hosts: Cluster) -> None:
    run_dir = hosts.folder / "outage"
    network, infer = hosts.networks["cluster"], hosts.hosts["infer0"]
    started = hosts.start_ranks(run_dir, NUM_PROMPTS, *OPTIONS)
    wait_for_open_batch(run_dir, 1, BATCH)
    network.cut(infer)
    try:
        time.sleep(DOWN_S)
        assert num_events(run_dir, "group_closed") == BATCH  # the second batch stays open
    finally:
        network.mend(infer)
    wait_for_ranks(started, 0)
    assert "on-policy" in hosts.verify(run_dir)
    assert sorted(sum(trained(run_dir), [])) == list(range(NUM_PROMPTS))
    assert attempts(run_dir) == 1


def test_a_trainer_host_is_cut_off(hosts: Cluster) -> None:
    """All ranks end with 75; resumed, the run comes to the numbers of one that was left alone."""
    calm, cut = hosts.folder / "calm" / "run", hosts.folder / "cut" / "run"
    for run_dir in (calm, cut):
        run_dir.parent.mkdir()
    wait_for_ranks(hosts.start_ranks(calm, NUM_PROMPTS, *OPTIONS, *STRICT), 0)

    network, lost = hosts.networks["cluster"], hosts.trainers[1]
    started = hosts.start_ranks(cut, NUM_PROMPTS, *OPTIONS, *STRICT)
    wait_for_open_batch(cut, 1, BATCH)
    network.cut(lost)
    try:
        cut_s = time.monotonic()
        wait_for_ranks(started, 75)
        assert time.monotonic() - cut_s < PEER_TIMEOUT_S + MARGIN_S
    finally:
        network.mend(lost)
    said = [log.read_text() for _, log in started]
    assert all("no sign of life of rank" in each and "--resume" in each for each in said)

    wait_for_ranks(hosts.start_ranks(cut, NUM_PROMPTS, *OPTIONS, *STRICT, "--resume"), 0)
    assert attempts(cut) == 2
    assert "on-policy" in hosts.verify(cut)
    assert outcome(cut) == outcome(calm)
