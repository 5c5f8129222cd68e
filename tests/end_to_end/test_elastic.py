"""A run killed with two ranks and one endpoint goes on with one rank and two endpoints.

The first batch is trained again, from the journal. One rank sums in another order than two, so the
second batch's weights differ in their last bits: what was finished of it is generated again.
"""

from __future__ import annotations

import orjson
import pytest

from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.ledger.verify import verify
from tests.end_to_end.conftest import MAX_MODEL_LEN
from tests.end_to_end.held_batch import BATCH, HeldBatch
from tests.end_to_end.trainer_run import run_trainer

pytestmark = pytest.mark.runs

ENGINE = ("trainer.zero_stage=2", "trainer.learning_rate=1e-3")


def lines(held: HeldBatch, kind: str) -> list[dict]:
    certificate = (held.run_dir / "certificate.jsonl").read_bytes().splitlines()
    return [record for line in certificate if (record := orjson.loads(line))["kind"] == kind]


@pytest.fixture(scope="module")
def resumed(served, tmp_path_factory):
    held = HeldBatch(tmp_path_factory.mktemp("elastic"), served.model, served.url)
    options = ["--num-threads", "1", "--max-model-len", str(MAX_MODEL_LEN)]
    try:
        with EmbeddedServerProcess(served.model, options) as second:
            held.start(*ENGINE, num_ranks=2).kill()
            held.proxy.open_gate()
            urls = f"inference.endpoints=[{held.proxy.url},{second.url}]"
            run_trainer([*held.command(*ENGINE, urls), "--resume"])
            yield held
    finally:
        held.close()


def test_every_prompt_is_in_the_weights_once(resumed):
    verdict = verify(resumed.run_dir)
    assert verdict.on_policy, verdict
    assert (verdict.batches, verdict.trained, verdict.superseded) == (2, 2 * BATCH, 1)
    assert verdict.ended


def test_the_first_batch_comes_from_the_journal(resumed):
    first, again, _ = lines(resumed, "batch")
    assert again["weights"] == first["weights"]
    assert all(group["recovered"] for group in again["groups"])
    assert {g["digest"] for g in again["groups"]} == {g["digest"] for g in first["groups"]}
    assert (first["num_ranks"], again["num_ranks"]) == (2, 1)


def test_groups_of_other_weights_are_made_again_and_the_certificate_says_so(resumed):
    _, _, second = lines(resumed, "batch")
    half = [[0, index] for index in range(BATCH, BATCH + BATCH // 2)]
    assert second["discarded"] == half
    assert not any(group.get("recovered") for group in second["groups"])
    assert len(second["confirmations"]) == 2
