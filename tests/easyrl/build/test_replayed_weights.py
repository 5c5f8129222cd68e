"""What a replay says of the weights: in the form in which the run had served them."""

from __future__ import annotations

import pytest
import torch

from easyrl.build.replay import HashedWeights
from easyrl.inference_client.transfer.artifact import Chunk, tensor_checksum, weights_digest
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.schema import APART, PolicyVersion
from tests.easyrl.weight_sync.adapter_endpoint import LORA, LoraEngine
from tests.tiny_models import save_tiny_model


@pytest.fixture
def engine(tmp_path) -> LoraEngine:
    torch.manual_seed(0)
    engine = LoraEngine(save_tiny_model(tmp_path / "model", "qwen3", tied=True))
    engine.train(1e-2)
    return engine


def digest(weights) -> str:
    return weights_digest([Chunk("", 0, {n: tensor_checksum(w) for n, w in weights.items()})])


def test_each_version_has_the_form_that_it_had_in_the_run(engine):
    """No endpoint need have proved anything, and the form may have changed between attempts."""
    whole = digest(dict(engine.named_weights()))
    apart = dict(engine.named_weights("base"))
    for name, weight in engine.named_weights("adapter"):
        scaled = name.endswith(".lora_B.weight")
        apart[name] = weight * (LORA.alpha / LORA.rank) if scaled else weight.clone()
    recorded = {0: APART + "0" * 64, 1: "0" * 64, 2: None}
    weights = HashedWeights(
        engine, Collectives(Ranks(0, 1, 0, 1)), lambda v, engine: None, LORA, recorded.__getitem__
    )
    told = [weights.publish(PolicyVersion("run", 0, v)).served.digest for v in recorded]
    assert told == [APART + digest(apart), whole, whole]
    assert weights.digests == dict(enumerate(told))
