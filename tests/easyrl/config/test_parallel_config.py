"""Section ``parallel``: what contradicts it, each message with its key, and what goes with it."""

from __future__ import annotations

import pytest

from easyrl.config import ConfigError
from easyrl.config.file import dump_config
from easyrl.recipes.loading import load_recipe
from tests.easyrl.config.test_config import MINIMAL, load

TENSOR = ["parallel.tensor=2", "trainer.zero_stage=1"]
PIPELINE = ["parallel.pipeline=2", "trainer.zero_stage=1"]
OF_RECORDS = """
source: records
model: {path: models/tiny}
data: {files: [train.jsonl]}
"""
# name → (overrides of the minimal config, beginning of the message)
CONTRADICTIONS = {
    "context": (["parallel.context=2"], "parallel.context: 2 is not built yet; use 1, and "),
    "expert": (["parallel.expert=4"], "parallel.expert: 4 is not built yet; use 1, and "),
    "no such schedule": (["parallel.schedule=zero_bubble"], "parallel.schedule: Input should be "),
    "no ranks": (["parallel.tensor=0"], "parallel.tensor: Input should be greater than 0"),
    "tokens shared by one": (
        ["parallel.sequence=true"],
        "parallel.sequence: shares tokens between the ranks of parallel.tensor, which is 1; remove",
    ),
    "chunks of one stage": (
        ["parallel.chunks_per_stage=2"],
        "parallel.chunks_per_stage: has no effect without a pipeline; remove it, or raise ",
    ),
    "layers of one stage": (
        ["parallel.layers_per_stage=[4]"],
        "parallel.layers_per_stage: has no effect without a pipeline; remove it, or raise ",
    ),
    "layers of another number of stages": (
        [*PIPELINE, "parallel.layers_per_stage=[1, 2, 1]"],
        "parallel.layers_per_stage: 3 numbers for parallel.pipeline=2 stages; give one for each",
    ),
    "a stage without layers": (
        [*PIPELINE, "parallel.layers_per_stage=[4, 0]"],
        "parallel.layers_per_stage[1]: Input should be greater than 0",
    ),
    "chunks of uneven stages": (
        [*PIPELINE, "parallel.layers_per_stage=[1, 3]", "parallel.chunks_per_stage=2"],
        "parallel.layers_per_stage: the chunks of an interleaved schedule are of one size; remove",
    ),
    "one schedule for several chunks": (
        [*PIPELINE, "parallel.chunks_per_stage=2", "parallel.schedule=single"],
        "parallel.schedule: single has no order for several chunks of layers in a stage; use flush",
    ),
    "pipeline with ZeRO 2, the default": (
        ["parallel.pipeline=2"],
        "trainer.zero_stage: 2 does not go with parallel.pipeline, whose stages run backwards in ",
    ),
    "pipeline with ZeRO 3": (
        ["parallel.pipeline=2", "parallel.tensor=2", "trainer.zero_stage=3"],
        "trainer.zero_stage: 3 does not go with parallel.pipeline",
    ),
    "ZeRO 0": (
        ["parallel.tensor=2", "trainer.zero_stage=0", "model.dtype=fp32"],
        "trainer.zero_stage: 0 sums no gradient norm over the ranks that share the model; use 1",
    ),
    "muon": (
        [*TENSOR, "trainer.optimizer=muon"],
        "trainer.optimizer: muon is not built for a model that is split; use adamw",
    ),
    "8-bit moments": (
        [*PIPELINE, "trainer.optimizer=adam8bit"],
        "trainer.optimizer: adam8bit is not built for a model that is split; use adamw",
    ),
    "optimizer on the host": (
        [*TENSOR, "trainer.offload_optimizer=true"],
        "trainer.offload_optimizer: is not built for a model that is split; remove it, or parallel",
    ),
    "reference on the host": (
        [*TENSOR, "trainer.offload_reference=true"],
        "trainer.offload_reference: is not built for a model that is split; remove it, or parallel",
    ),
    "lagged old policy": (
        [*TENSOR, "trainer.old_policy=lagged"],
        "trainer.old_policy: lagged is not built for a model that is split; use auto",
    ),
    "adapters": (
        [*PIPELINE, "model.lora={rank: 4}"],
        "model.lora: adapters are not built for a model that is split; remove it, or parallel.pipe",
    ),
    "fused layers": (
        [*TENSOR, "model.fused_layers=liger"],
        "model.fused_layers: liger fuses Hugging Face's layers, which a model that is split does ",
    ),
    "critic": (
        [*TENSOR, "critic.path=models/critic"],
        "critic.path: a critic is not built for a model that is split; remove it, or parallel.tens",
    ),
    "broadcast": (
        [*TENSOR, "weight_sync.transport=nccl"],
        "weight_sync.transport: nccl sends whole tensors from one rank, of which a model that is ",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_names_its_key_and_the_remedy(tmp_path, name):
    overrides, message = CONTRADICTIONS[name]
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, MINIMAL, *overrides)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert any(line.startswith(message) for line in lines), caught.value


@pytest.mark.parametrize("key", ["parallel.tensor", "parallel.pipeline"])
def test_a_run_on_records_is_refused(tmp_path, key):
    with pytest.raises(ConfigError, match=f"{key}: a run on records is not built for a model that"):
        load(tmp_path, OF_RECORDS, f"{key}=2", "trainer.zero_stage=1")
    assert not load(tmp_path, OF_RECORDS).parallel.is_split


@pytest.mark.parametrize(
    ("recipe", "model"),
    [("{name: ppo}", "critic"), ("{name: distillation, teacher: models/teacher}", "teacher")],
)
def test_a_recipe_with_another_model_is_refused(tmp_path, recipe, model):
    whole = load(tmp_path, MINIMAL, f"recipe={recipe}")
    assert load_recipe(whole).needs
    split = load(tmp_path, MINIMAL, f"recipe={recipe}", *TENSOR)
    with pytest.raises(ConfigError, match=f"recipe.name: .* has a {model}, which is not built for"):
        load_recipe(split)


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.tensor=4", "parallel.sequence=true", "trainer.zero_stage=3"],
        [*TENSOR, "parallel.pipeline=2", "run.determinism=strict", "trainer.updates_per_batch=2"],
        [*PIPELINE, "parallel.chunks_per_stage=2"],
        [*PIPELINE, "parallel.layers_per_stage=[1, 3]", "model.fused_layers=none"],
    ],
)
def test_what_goes_together_survives_a_dump(tmp_path, overrides):
    config = load(tmp_path, MINIMAL, *overrides)
    assert config.parallel.is_split
    assert load(tmp_path, dump_config(config)) == config


@pytest.mark.parametrize(
    ("overrides", "ranks", "key"),
    [
        ([], 1, "parallel.pipeline"),
        (TENSOR, 2, "parallel.tensor"),
        (PIPELINE, 2, "parallel.pipeline"),
        ([*TENSOR, "parallel.pipeline=4"], 8, "parallel.tensor"),
    ],
)
def test_how_many_processes_share_a_model(tmp_path, overrides, ranks, key):
    parallel = load(tmp_path, MINIMAL, *overrides).parallel
    assert parallel.ranks_per_model == ranks and parallel.is_split == (ranks > 1)
    assert parallel.split_key == key
