"""An endpoint that proves the right weights and samples with others: nothing of it is trained."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from aiohttp import web

from benchmarks.parts.random_model import write_prompts, write_random_model
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.ledger.verify import verify
from easyrl.metrics.logprob_agreement import LIMITS
from easyrl.weight_sync.canary import CANARY_TOKENS
from tests.end_to_end.conftest import MAX_MODEL_LEN, ServedModel
from tests.end_to_end.proxy import GENERATE, Proxy
from tests.end_to_end.trainer_run import run_trainer, trainer_command

pytestmark = pytest.mark.runs

NUM_BATCHES, BATCH, NUM_GENERATIONS = 2, 6, 4


class OtherWeightsProxy(Proxy):
    """Has responses made by ``other``, under the version that its own server would stamp.

    Weights, proofs and the canary's samples are its own server's.
    """

    def __init__(self, upstream: str, other: str) -> None:
        self._other = other
        self.num_lies = 0
        super().__init__(upstream)

    async def answer(self, request: web.Request, body: bytes) -> web.Response | None:
        if request.path != GENERATE:
            return None
        if orjson.loads(body)["sampling_params"]["max_tokens"] == CANARY_TOKENS:
            return None
        own = await self.forward("POST", GENERATE, body)
        async with self._session.post(
            self._other + GENERATE, data=body, headers={"Content-Type": "application/json"}
        ) as response:
            lie = await response.json()
        [stamp] = {
            span["version"]
            for choice in orjson.loads(own.body)["choices"]
            for span in choice["weight_versions"]
        }
        for choice in lie["choices"]:
            for span in choice["weight_versions"]:
                span["version"] = stamp
        self.num_lies += 1
        return web.Response(body=orjson.dumps(lie), content_type="application/json")


@pytest.fixture(scope="module")
def run(
    served: ServedModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, str, int, str]:
    """Its folder, the URLs of the sound endpoint and of the other, whose lies, what was printed."""
    folder = tmp_path_factory.mktemp("agreement")
    model = write_random_model(folder / "model", hidden_size=32, num_layers=1, seed=7)
    prompts = write_prompts(folder / "prompts.jsonl", NUM_BATCHES * BATCH, 12)
    options = ["--num-threads", "1", "--max-model-len", str(MAX_MODEL_LEN)]
    with (
        EmbeddedServerProcess(model, options) as sound,
        EmbeddedServerProcess(model, options) as second,
    ):
        proxy = OtherWeightsProxy(second.url, served.url)
        try:
            said = run_trainer(
                trainer_command(
                    folder / "run",
                    model,
                    prompts,
                    [sound.url, proxy.url],
                    *(f"trainer.batch_size={BATCH}", f"rollout.num_generations={NUM_GENERATIONS}"),
                    *("rollout.max_tokens=24", "inference.max_inflight=4"),
                    *("trainer.learning_rate=1e-3", "checkpoint.every_steps=0"),
                )
            )
        finally:
            proxy.close()
    return folder / "run", sound.url, proxy.url, proxy.num_lies, said


def batches(run_dir: Path) -> list[dict]:
    lines = map(orjson.loads, (run_dir / "certificate.jsonl").read_bytes().splitlines())
    return [line for line in lines if line["kind"] == "batch"]


def test_only_the_sound_endpoint_is_trained_on(run):
    run_dir, sound, lying, num_lies, _ = run
    assert num_lies >= 3, "it was hardly asked"
    lines = batches(run_dir)
    assert len(lines) == NUM_BATCHES
    for line in lines:
        assert {url for group in line["groups"] for url in group["endpoints"]} == {sound}
        [seen] = line["agreement"]
        assert seen["url"] == sound and seen["num_tokens"] > 100 and seen["maximum"] < 1e-4
    verdict = verify(run_dir)
    assert verdict.on_policy and verdict.ended and verdict.trained == NUM_BATCHES * BATCH, verdict


def test_the_other_one_had_proved_the_weights_and_is_excluded_by_name_and_number(run):
    run_dir, sound, lying, _, said = run
    first, second = batches(run_dir)
    assert {c["url"] for c in first["confirmations"]} == {sound, lying}
    assert {c["url"] for c in second["confirmations"]} == {sound}
    [told] = [line for line in said.splitlines() if f"{lying} is excluded" in line]
    assert "log-probabilities differ from the trainer's by" in told
    assert f"limit {LIMITS['fp32']:g}" in told
