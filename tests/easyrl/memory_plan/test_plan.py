"""The plan's arithmetic: sizes from ``config.json``, stages, what is shared by whom, remedies."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen3Config

from easyrl.config import ConfigError
from easyrl.config.file import load_config, validate_config
from easyrl.engines.deepspeed.memory import bytes_per_parameter
from easyrl.engines.megatron.layout import Layout
from easyrl.engines.megatron.weights.mapping import Split, rules
from easyrl.engines.megatron.weights.pieces import TensorRank, pieces
from easyrl.memory_plan.model_shape import model_shape
from easyrl.memory_plan.plan import plan_memory
from easyrl.memory_plan.remedies import remedies
from easyrl.memory_plan.stages import stages
from tests.easyrl.memory_plan.memory_cases import PROMPT, ROW_TOKENS, SIZES, config
from tests.tiny_models import CLASSES, FAMILIES, tiny_config, tiny_model

# As published in their config.json, and the number of parameters that their cards give.
QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
    architectures=["Qwen3ForCausalLM"],
)
QWEN2_32B = Qwen2Config(
    vocab_size=152064,
    hidden_size=5120,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    tie_word_embeddings=False,
    architectures=["Qwen2ForCausalLM"],
)
READY = Path(__file__).resolve().parents[3] / "configs"


def write(folder: Path, family: str = "qwen3", **sizes: object) -> Path:
    """``config.json`` alone."""
    described = tiny_config(family, **(SIZES | sizes))  # type: ignore[arg-type]
    described.architectures = [CLASSES[family][1].__name__]  # type: ignore[index]
    described.save_pretrained(folder)
    return folder


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shape_has_the_parameters_of_the_model(tmp_path, family, tied):
    model = tiny_model(family, tied=tied)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)  # no weights
    shape = model_shape(config(tmp_path).model)
    assert shape.parameters == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shape.tied is tied and shape.architecture == type(model).__name__


def test_published_numbers_of_parameters(tmp_path):
    QWEN3_8B.save_pretrained(tmp_path / "8b")
    QWEN2_32B.save_pretrained(tmp_path / "32b")
    eight, large = (model_shape(config(tmp_path / name).model) for name in ("8b", "32b"))
    assert eight.num_parameters == 8_190_735_360
    assert large.num_parameters == 32_763_876_352
    assert (eight.queries, eight.keys, eight.has_head_norms) == (4096, 1024, True)
    assert not large.has_head_norms


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path: .* holds no Hugging Face model"):
        plan_memory(config(tmp_path), 1)


# ---- stages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2),
        Layout(tensor=4),  # twice as many as key-value heads
        Layout(pipeline=3),
        Layout(tensor=2, pipeline=2, data=2),
        Layout(pipeline=3, chunks=2),
    ],
    ids=lambda layout: f"tp{layout.tensor}pp{layout.pipeline}c{layout.chunks}",
)
def test_stages_have_what_is_loaded_into_them(tmp_path, layout, tied):
    """A rank's parameters, counted by the pieces that the engine reads from a checkpoint."""
    sizes = {"num_key_value_heads": 2, "vocab_size": 4099}  # padded where it is shared
    shape = model_shape(config(write(tmp_path, tied=tied, **sizes)).model)
    every = rules(shape.architecture, shape.num_layers, tied=tied)
    total = 0
    for rule in every.values():
        if tied and layout.pipeline == 1 and rule.parameter == "output_layer.weight":
            continue
        for rank in range(layout.tensor):
            place = TensorRank(rank, layout.tensor)
            for piece in pieces(rule, shape.parameters, place, num_kv_heads=2):
                whole = shape.parameters[piece.tensor]
                total += piece.size * prod(whole) // whole[piece.dim]
            if rule.split is Split.ROWS:
                total += (-4099 % layout.tensor) * shape.hidden * (rank == 0)
    planned = stages(shape, layout)
    assert sum(stage.num_parameters for stage in planned) * layout.tensor == total
    assert sum(stage.num_layers for stage in planned) == shape.num_layers
    assert [s.number for s in planned if s.is_first] == [0]
    assert [s.number for s in planned if s.is_last] == [layout.pipeline - 1]
    if not tied and layout.pipeline > 1:  # one has the embedding, the other a norm more
        assert planned[-1].num_parameters - planned[0].num_parameters == shape.hidden


def test_a_model_that_is_not_split_has_each_parameter_once(tmp_path):
    shape = model_shape(config(write(tmp_path)).model)
    (stage,) = stages(shape, Layout(data=4))
    assert stage.num_parameters == shape.num_parameters


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_what_is_held_is_the_documented_table(tmp_path, zero_stage, ranks):
    settings = config(write(tmp_path), trainer={"zero_stage": zero_stage})
    plan = plan_memory(settings, ranks)
    per_parameter = bytes_per_parameter(zero_stage, "bf16", ranks).device
    assert plan.stages[0].held_bytes == pytest.approx(per_parameter * plan.shape.num_parameters)


def test_tensor_ranks_and_stages_divide_it(tmp_path):
    folder = write(tmp_path, tied=False)
    trainer = {"zero_stage": 1}
    whole = plan_memory(config(folder, trainer=trainer), 1).stages[0]
    split = plan_memory(
        config(folder, trainer=trainer, parallel={"tensor": 2, "pipeline": 2}), 4
    ).stages
    assert sum(stage.held_bytes for stage in split) == pytest.approx(whole.held_bytes / 2, rel=0.01)
    assert sum(each.stage.num_layers for each in split) == whole.stage.num_layers


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"pipeline": 3}, [3, 2, 1]),
        # warm-up of interleaved 1F1B, in chunks: 4 + 3, 2 + 3, 0 + 3, and one; halves of a stage
        ({"pipeline": 3, "chunks_per_stage": 2}, [4.0, 3.0, 2.0]),
    ],
)
def test_earlier_stages_hold_more_rows(tmp_path, parallel, expected):
    settings = config(write(tmp_path), trainer={"zero_stage": 1}, parallel=parallel)
    planned = plan_memory(settings, 3).stages
    assert [stage.running.rows_in_flight for stage in planned] == expected
    activations = [stage.running.activations for stage in planned]
    assert activations == sorted(activations, reverse=True)
    assert activations[0] / expected[0] < activations[1] / expected[1]  # which sends and receives


def test_sequence_parallelism_shares_what_is_between_the_matrices(tmp_path):
    folder, trainer = write(tmp_path), {"zero_stage": 1}
    model = {"activation_checkpointing": "layer"}
    plain, sequence = (
        plan_memory(
            config(folder, model=model, trainer=trainer, parallel={"tensor": 2} | more), 2
        ).stages[0]
        for more in ({}, {"sequence": True})
    )
    assert sequence.running.activations == pytest.approx(plain.running.activations / 2)


def test_frozen_models_are_as_large_as_the_policy(tmp_path):
    folder = write(tmp_path)
    more = {"recipe": {"kl_coef": 0.1}, "trainer": {"zero_stage": 1, "updates_per_batch": 2}}
    held = plan_memory(config(folder, **more), 1).stages[0].held
    assert held.frozen == 2 * held.weights
    more["trainer"] |= {"offload_reference": True}  # type: ignore[dict-item]
    offloaded = plan_memory(config(folder, **more), 1).stages[0].held
    assert offloaded.frozen == held.weights
    assert offloaded.host - held.host == held.weights


def test_a_critic_is_planned(tmp_path):
    folder = write(tmp_path, tied=False)
    plan = plan_memory(config(folder, recipe={"name": "ppo"}, trainer={"zero_stage": 1}), 1)
    without_head = plan.shape.num_parameters - plan.shape.embedding_numel
    assert plan.stages[0].held.critic == 18 * without_head


def test_a_run_on_records_is_planned(tmp_path):
    tree = {
        "source": "records",
        "model": {"path": str(write(tmp_path))},
        "data": {"files": ["train.jsonl"], "format": "preference", "max_tokens": 3000},
        "recipe": {"name": "dpo"},
        "trainer": {"max_tokens_per_micro_batch": 4096},
    }
    plan = plan_memory(validate_config(tree), 1)
    assert plan.row_tokens == 6000  # a pair is not split
    assert plan.stages[0].held.frozen == plan.stages[0].held.weights  # its reference


def test_a_teacher_is_planned_by_its_own_size(tmp_path):
    teacher = write(tmp_path / "teacher", num_hidden_layers=12)
    recipe = {"name": "distillation", "teacher": str(teacher)}
    trainer = {"zero_stage": 1}
    sizes = config(write(tmp_path / "student"), trainer=trainer)
    plan = plan_memory(config(tmp_path / "student", trainer=trainer, recipe=recipe), 1)
    expected = model_shape(sizes.model.model_copy(update={"path": teacher})).num_parameters
    assert plan.stages[0].held.frozen == 2 * expected


def test_adapters_are_planned(tmp_path):
    """Only their factors have gradients and state; the reference is the model below them."""
    folder = write(tmp_path)
    recipe, trainer = {"kl_coef": 0.1}, {"zero_stage": 1}
    lora = {"rank": 4, "target_modules": ["q_proj", "down_proj"]}
    plan = plan_memory(config(folder, model={"lora": lora}, recipe=recipe, trainer=trainer), 1)
    queries, mlp = 8 * 64, 1024
    factors = 6 * 4 * (256 + queries + mlp + 256)
    held = plan.stages[0].held
    assert held.gradients == 4 * factors and held.optimizer == 12 * factors
    assert held.weights == 2 * (plan.shape.num_parameters + factors)
    assert held.frozen == 0


def test_the_longest_row_is_planned(tmp_path):
    folder = write(tmp_path)
    assert plan_memory(config(folder), 1).row_tokens == ROW_TOKENS
    long = config(folder, rollout={"max_tokens": 5000})
    assert plan_memory(long, 1).row_tokens == PROMPT + 5000


@pytest.mark.parametrize(
    ("family", "parallel", "processes", "message"),
    [
        ("qwen3", {"pipeline": 3}, 4, "parallel.pipeline: 3 processes share one copy"),
        ("qwen3", {"pipeline": 4}, 4, "parallel.pipeline: 6 layers cannot be shared evenly"),
        ("qwen3", {"tensor": 3}, 3, "parallel.tensor: 8 attention heads cannot be shared by 3"),
        ("qwen3", {"pipeline": 2, "layers_per_stage": [1, 2]}, 2, "parallel.layers_per_stage: "),
        ("qwen3_moe", {"tensor": 2}, 2, "parallel: a Qwen3MoeForCausalLM cannot be split"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(
    tmp_path, family, parallel, processes, message
):
    settings = config(write(tmp_path, family), trainer={"zero_stage": 1}, parallel=parallel)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        plan_memory(settings, processes)


def test_uneven_stages_are_planned(tmp_path):
    parallel = {"pipeline": 2, "layers_per_stage": [2, 4]}
    settings = config(write(tmp_path), trainer={"zero_stage": 1}, parallel=parallel)
    planned = plan_memory(settings, 2).stages
    assert [each.stage.num_layers for each in planned] == [2, 4]


# ---- remedies ------------------------------------------------------------------------------------


def loader(folder: Path, **sections: dict[str, object]):
    """``config`` with overrides on top, as the command loads them."""

    def load(overrides):
        tree = {name: dict(values) for name, values in sections.items()}
        for override in overrides:
            key, value = override.split("=")
            section, name = key.split(".")
            tree.setdefault(section, {})[name] = json.loads(value) if value != "layer" else value
        return config(folder, **tree)

    return load


def test_what_is_proposed_fits(tmp_path):
    load = loader(write(tmp_path), trainer={"zero_stage": 1, "max_tokens_per_micro_batch": 8192})
    plan = plan_memory(load(()), 2)
    limit = plan.needed * 0.75
    changes = remedies(load, plan, limit, on_cpu=False)
    assert changes
    for change in changes:
        size = change.world_size or 2
        assert plan_memory(load(change.overrides), size).needed <= limit


def test_several_changes_are_proposed_where_one_is_not_enough(tmp_path):
    folder = write(tmp_path, "qwen3_moe")  # which cannot be split
    load = loader(folder, trainer={"zero_stage": 1, "max_tokens_per_micro_batch": 8192})
    plan = plan_memory(load(()), 2)
    several = ("model.activation_checkpointing=layer", "trainer.zero_stage=2")
    limit = plan_memory(load(several), 2).needed
    (found,) = remedies(load, plan, limit, on_cpu=False)
    size = found.world_size or 2
    assert plan_memory(load(found.overrides), size).needed <= limit
    assert len(found.overrides) > 1
    for one in found.overrides:
        assert plan_memory(load([one]), size).needed > limit
    assert remedies(load, plan, 1.0, on_cpu=False) == []


@pytest.mark.parametrize(
    ("name", "model", "processes"),
    [("qwen3_8b_16_devices", QWEN3_8B, 8), ("qwen_32b_48_devices", QWEN2_32B, 16)],
)
def test_the_ready_files_fit_their_devices(tmp_path, name, model, processes):
    model.save_pretrained(tmp_path)
    settings = load_config(READY / f"{name}.yaml", [f"model.path={tmp_path}"])
    plan = plan_memory(settings, processes)
    assert 0.4 * 64e9 < plan.needed < 0.9 * 64e9
