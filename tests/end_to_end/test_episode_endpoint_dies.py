"""An endpoint that dies in the middle of episodes: another one goes on behind the same tokens."""

from __future__ import annotations

from collections import Counter

import pytest

from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.ledger.verify import verify
from tests.end_to_end.exactness.endpoint_log import (
    RecordingProxy,
    sampled_tokens,
    trained_tokens,
)
from tests.end_to_end.exactness.model import write_model
from tests.end_to_end.exactness.played_run import LENGTH, NUM_TURNS, TREES, PlayedRun, played

pytestmark = pytest.mark.runs

LAST_TURNS = 15  # of the endpoint that dies, in the first batch


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PlayedRun:
    folder = tmp_path_factory.mktemp("dies")
    model = write_model(folder / "model")
    options = ["--num-threads", "1", *LENGTH]
    with (
        EmbeddedServerProcess(model, options) as first,
        EmbeddedServerProcess(model, options) as second,
    ):
        proxies = [RecordingProxy(first.url), RecordingProxy(second.url, (LAST_TURNS, second.kill))]
        try:
            run = played(folder, "embedded", model, proxies, "inference.health_interval_s=0.5")
            assert second.has_ended and len(proxies[1].log) >= LAST_TURNS
            return run
        finally:
            for proxy in proxies:
                proxy.close()


def test_turns_behind_the_death_continue_those_before_it(run: PlayedRun) -> None:
    crossed = 0
    for behaviour, tree in TREES.items():
        for completion in run.episodes(behaviour):
            assert completion.episode is not None and completion.episode.failure is None
            turns = completion.episode.turns
            if behaviour != "sub_agent":  # of which two go on at the same time
                assert [turn.parent for turn in turns] == tree
            crossed += sum(
                turn.parent is not None and turns[turn.parent].endpoint != turn.endpoint
                for turn in turns
            )
    print(f"{crossed} turns continue another endpoint's")
    assert crossed > 0


def test_what_is_trained_was_sampled_by_one_of_them(run: PlayedRun) -> None:
    recorded = Counter(run.recorded)
    assert recorded.total() == NUM_TURNS
    assert recorded <= Counter(run.log)  # what came as it died may have been asked for again
    assert trained_tokens(run.rows()) == sampled_tokens(run.recorded)


def test_it_was_on_policy(run: PlayedRun) -> None:
    verdict = verify(run.folder)
    assert verdict.on_policy and verdict.ended and verdict.trained == len(run.groups), verdict
