"""Streamed gradients of distillation in fp64, with teachers of other architectures and sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from easyrl.build.ledger import reference_identity
from easyrl.build.same_vocabulary import check_vocabularies
from easyrl.build.tokenizer import load_tokenizer, read_tokenizer
from easyrl.config import Config, ConfigError, ModelConfig, RecipeConfig
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.engines.deepspeed.sharded_loading import take_projection
from easyrl.models.loading import load_policy_model
from easyrl.models.teacher import FullTeacher
from easyrl.models.teacher_loading import load_teacher, teacher_config
from easyrl.models.tri_model import TriModel, frozen_model
from easyrl.recipes.distillation import Distillation
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from tests.easyrl.engines.engine_cases import TEMPERATURE, relative_error
from tests.easyrl.models.teacher_cases import (
    TEACHERS,
    denominator_of,
    dense_gold,
    prepare,
    recipe_of,
    rows_of,
)
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

CPU = torch.device("cpu")
WAYS = [("sampled", "token"), ("sampled", "sequence"), ("full", "token"), ("full", "sequence")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"))


def tri_model(folder: Path, recipe: Distillation) -> TriModel:
    """fp64."""
    policy = load_policy_model(ModelConfig(path=folder / "policy"), dtype=torch.float64)
    assert recipe.teacher is not None
    its = load_policy_model(ModelConfig(path=recipe.teacher), dtype=torch.float64)
    teacher = frozen_model(its)
    if recipe.divergence == "full":
        teacher = FullTeacher(its, *take_projection(its), its.logits)  # type: ignore[assignment]
    return TriModel(
        policy,
        reference=None,
        old_policy=None,
        teacher=teacher,
        temperature=TEMPERATURE,
        device=CPU,
    )


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize(("divergence", "credit"), WAYS)
def test_streamed_gradient_is_the_dense_one(
    folder: Path, teacher: str, divergence: str, credit: str
) -> None:
    """RMSNorm rounds to fp32 in these models: 1e-6 is what that leaves."""
    gold, mean = dense_gold(folder, teacher, divergence, float("inf"), credit)
    recipe = recipe_of(folder, teacher, divergence, credit)
    tri, denominator, counted = tri_model(folder, recipe), denominator_of(recipe), 0.0
    for index, row in enumerate(rows_of(recipe)):
        same_pass = recipe.span == "token" and index % 2 == 0  # both ways in one gradient
        loss_sum, metrics = tri.loss(row, recipe, same_pass=same_pass)
        (loss_sum / denominator).backward()
        counted += metrics.sums["teacher_kl_sum"]
    named = tri.policy.named_parameters()
    gradients = {n.removeprefix("model."): p.grad for n, p in named if p.grad is not None}
    assert relative_error(gradients, gold.gradients) < 1e-6
    assert counted / denominator == pytest.approx(mean, rel=1e-6)
    assert isinstance(tri.teacher, FullTeacher) == (divergence == "full")
    module = tri.teacher.module  # type: ignore[union-attr]
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("same_pass", [True, False])
@pytest.mark.parametrize("divergence", ["sampled", "full"])
def test_a_dummy_row_has_no_gradient(folder: Path, divergence: str, same_pass: bool) -> None:
    recipe = recipe_of(folder, "larger", divergence)
    tri = tri_model(folder, recipe)
    loss_sum, metrics = tri.loss(dummy_micro_batch(), recipe, same_pass=same_pass)
    loss_sum.backward()
    assert not metrics.sums and loss_sum.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in tri.policy.parameters())


def test_what_was_scored_ahead_is_not_scored_again(folder: Path) -> None:
    recipe = recipe_of(folder, "larger", "sampled")
    tri = tri_model(folder, recipe)
    row = rows_of(recipe)[0]
    frozen = tri.frozen_logprobs(row)
    assert frozen.teacher is not None and frozen.reference is frozen.old_policy is None
    shifted = replace(row, frozen=replace(frozen, teacher=frozen.teacher + 1))
    first, second = (
        tri.loss(each, recipe, same_pass=True)[1].sums["teacher_kl_sum"] for each in (row, shifted)
    )
    assert first - second == pytest.approx(row.num_loss_tokens, rel=1e-9)


def test_a_teacher_has_the_policy_s_settings_but_for_its_training(folder: Path) -> None:
    policy = ModelConfig(
        path=folder / "policy",
        dtype="fp32",
        attention="merged",
        activation_checkpointing="layer",
        lora={"rank": 2},  # type: ignore[arg-type]
    )
    model = teacher_config(policy, folder / "larger")
    assert (model.dtype, model.attention) == ("fp32", "merged")
    assert model.lora is None and model.recomputed == "none"
    assert load_teacher(policy, folder / "larger").model.config.hidden_size == 48


def test_a_folder_that_holds_no_model_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"recipe.teacher: {tmp_path} holds no Hugging Face"):
        load_teacher(ModelConfig(path=folder / "policy"), tmp_path)


# ---- the vocabulary ------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Policy and teacher with tokenizers."""
    for name, family in (("policy", "qwen3"), ("teacher", "llama")):
        path = save_tiny_model(tmp_path / name, family)  # type: ignore[arg-type]
        tiny_tokenizer().save_pretrained(path)
    return tmp_path


def config_of(folder: Path, name: str = "distillation", **keys: str) -> Config:
    if name == "distillation":
        keys["teacher"] = str(folder / "teacher")
    recipe = RecipeConfig(name=name, **keys)  # type: ignore[arg-type]
    return Config.model_validate(
        {
            "model": {"path": folder / "policy"},
            "data": {"files": ["train.jsonl"]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "critic": {"path": folder / "teacher"},
            "recipe": recipe,
        }
    )


def check(folder: Path, **keys: str) -> None:
    config = config_of(folder, **keys)
    check_vocabularies(config, load_tokenizer(config), read_tokenizer)


def test_the_same_tokens_pass(pair: Path) -> None:
    check(pair)


def test_a_smaller_vocabulary_is_refused(pair: Path) -> None:
    save_tiny_model(pair / "teacher", "llama", vocab_size=60)
    with pytest.raises(ConfigError, match=r"recipe.teacher: .* a vocabulary of 60 ids, .* of 67"):
        check(pair)


def test_padding_is_refused_where_whole_distributions_are_compared(pair: Path) -> None:
    save_tiny_model(pair / "teacher", "llama", vocab_size=70)
    check(pair)
    with pytest.raises(ConfigError, match=r"recipe.teacher: .* a vocabulary of 70 ids, .* of 67"):
        check(pair, divergence="full")


def test_a_critic_of_another_vocabulary_is_refused(pair: Path) -> None:
    check(pair, name="ppo")
    save_tiny_model(pair / "teacher", "llama", vocab_size=60)
    with pytest.raises(ConfigError, match=r"critic.path: .* a vocabulary of 60 ids, .* of 67"):
        check(pair, name="ppo")


def test_the_first_token_that_differs_is_named(pair: Path) -> None:
    file = pair / "teacher" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    (low, other), (high, _) = sorted((i, t) for t, i in vocab.items())[5:7]
    swapped = {token: {low: high, high: low}.get(i, i) for token, i in vocab.items()}
    tokenizer["model"]["vocab"] = swapped
    file.write_text(json.dumps(tokenizer))
    said = f"{other!r} first: its id is {high}, the policy's is {low}; use a model of"
    with pytest.raises(ConfigError) as refused:
        check(pair)
    assert str(refused.value).startswith("recipe.teacher: ") and said in str(refused.value)


def test_a_teacher_without_a_tokenizer_is_refused(pair: Path) -> None:
    for file in (pair / "teacher").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="recipe.teacher: .* has no tokenizer; give a folder"):
        check(pair)


def test_a_checkpoint_knows_its_teacher(pair: Path) -> None:
    """The teacher is in no checkpoint: what is kept of it is the hash of its files."""
    config, alone = config_of(pair), Collectives(Ranks.data_parallel(0, 1))
    first = reference_identity(config, alone)
    assert first is not None and first == reference_identity(config, alone)
    save_tiny_model(pair / "policy", "qwen3", seed=9)  # in every checkpoint itself
    assert reference_identity(config, alone) == first
    save_tiny_model(pair / "teacher", "llama", seed=9)
    assert reference_identity(config, alone) != first
