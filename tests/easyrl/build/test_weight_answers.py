"""A recorded proof is formed again where the weights are still there, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from easyrl.build.weight_answers import RecomputedAnswers
from easyrl.inference_client.transfer.artifact import weights_digest
from easyrl.schema import APART, WeightProof
from easyrl.weight_sync.challenge import answers_digest
from tests.inference_client.served_tensors import whole
from tests.inference_client.written_artifact import write_artifact

WEIGHTS = {"embed": torch.randn(4, 3), "norm": torch.randn(4).bfloat16()}
NONCE = bytes(range(32))
RIGHT = answers_digest([whole(WEIGHTS, NONCE)])
PROOF = WeightProof(NONCE.hex(), 2, 1, RIGHT, whole=True)


@pytest.fixture
def served(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(f"weight_sync: {{directory: {tmp_path}}}\n")
    return tmp_path


def test_it_is_found_by_version_and_weights(served: Path) -> None:
    directory = served / "easyrl-run-ab-2" / "run-ab-0-3"
    directory.parent.mkdir()
    artifact = write_artifact(WEIGHTS.items(), directory, "run-ab:0:3", 2**20)
    weights = weights_digest(artifact.chunks)
    answers = RecomputedAnswers(served)
    assert answers("run-ab:0:3", weights, PROOF) == RIGHT
    other = replace(PROOF, nonce=bytes(32).hex())
    assert answers("run-ab:0:3", weights, other) not in (None, RIGHT)
    assert answers("run-ab:0:3", "0" * 64, PROOF) is None  # other weights of that name
    assert answers("run-ab:0:4", weights, PROOF) is None
    assert answers("run-ab:0:3", weights, replace(PROOF, whole=False)) is None
    file = directory / artifact.chunks[0].file
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert answers("run-ab:0:3", weights, PROOF) is None  # damaged: says nothing of the endpoint


def test_an_adapter_is_bound_to_the_model_below_it(served: Path) -> None:
    root = served / "easyrl-run-ab"
    root.mkdir()
    below = {"model": torch.randn(2, 2)}
    base = write_artifact(below.items(), root / "run-ab-0-base", "run-ab:0:base", 2**20)
    adapter = write_artifact(WEIGHTS.items(), root / "run-ab-0-3", "run-ab:0:3", 2**20)
    answers = RecomputedAnswers(served)
    both = APART + weights_digest([*base.chunks, *adapter.chunks])
    assert answers("run-ab:0:3", both, PROOF) == RIGHT
    assert answers("run-ab:0:3", both.removeprefix(APART), PROOF) is None  # of a whole model
    alone = APART + weights_digest(adapter.chunks)
    assert answers("run-ab:0:3", alone, PROOF) is None
    write_artifact({"model": below["model"] + 1}.items(), root / "run-ab-0-base", "b", 2**20)
    assert answers("run-ab:0:3", both, PROOF) is None


def test_without_settings_nothing_is_formed(tmp_path: Path) -> None:
    assert RecomputedAnswers(tmp_path)("run:0:0", "0" * 64, PROOF) is None
