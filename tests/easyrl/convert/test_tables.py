"""The tables of the peers' keys: whole, up to date, and as the peers' own sources have them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from easyrl.config.reference import keys
from easyrl.convert import values
from easyrl.convert.convert import PEERS, convert_file
from easyrl.convert.peer import Peer, Values
from easyrl.convert.reading import flat, read_tree
from easyrl.convert.reference import markdown
from easyrl.recipes.loading import BUILT_IN
from tests.peers import peer, peer_folder

ROOT = Path(__file__).parents[3]
OURS = {key.path for key in keys()} | {"rewards"}
SECTIONS = {key.rpartition(".")[0] for key in OURS} | {"evaluation", "model.lora"}
OF_RECIPES = {field.name for cls in BUILT_IN.values() for field in dataclasses.fields(cls)}


def test_the_document_is_up_to_date() -> None:
    command = "python -m easyrl.convert.reference > docs/moving.md"
    assert (ROOT / "docs/moving.md").read_text() == markdown(), f"run {command}"


@pytest.mark.parametrize("which", PEERS.values(), ids=list(PEERS))
def test_no_key_is_there_twice_and_every_one_says_something(which: Peer) -> None:
    names = [row.theirs for row in which.rows]
    assert len(set(names)) == len(names) > 90
    assert [row.theirs for row in which.rows if not row.ours and not row.how] == []


@pytest.mark.parametrize("which", PEERS.values(), ids=list(PEERS))
def test_our_keys_are_there(which: Peer) -> None:
    for row in which.rows:
        for ours in filter(None, row.ours.split(", ")):
            section, _, name = ours.rpartition(".")
            if section == "recipe":
                assert name in OF_RECIPES | {"name"}, ours
            else:
                assert ours in OURS or ours in SECTIONS or name == "*", ours


A = "actor_rollout_ref.actor."
SITUATIONS: dict[str, list[dict[str, Any]]] = {  # in which keys count
    "trl": [
        {"use_vllm": True, "vllm_mode": "server", "use_peft": True, "use_adaptive_entropy": True},
        {"use_vllm": True, "beta": 0.1},
    ],
    "verl": [
        {"data.val_files": "v", "trainer.test_freq": 1, f"{A}use_dynamic_bsz": True},
        {f"{A}use_kl_loss": True, "algorithm.filter_groups.enable": True},
        {f"{A}strategy": "megatron", f"{A}megatron.tensor_model_parallel_size": 2},
        {"algorithm.use_kl_in_reward": True, "algorithm.filter_groups.max_num_gen_batches": 2},
        {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 2},
        {
            "algorithm.rollout_correction.rollout_is": "token",
            f"{A}optim.lr_scheduler_type": "cosine",
        },
        {f"{A}clip_ratio_low": None, "algorithm.adv_estimator": "grpo"},
        {"actor_rollout_ref.model.lora_rank": 8, f"{A}loss_agg_mode": "seq-mean-token-sum-norm"},
        {"reward.custom_reward_function.path": __file__},
        {"custom_reward_function.path": __file__},
        {"actor_rollout_ref.rollout.val_kwargs.do_sample": True, "data.val_files": "v"}
        | {"trainer.test_freq": 1},
    ],
}


class Watched(Values):
    """Notes the keys that are looked at."""

    def as_given(self, key: str) -> Any:
        looked_at.add(key)
        return super().as_given(key)


looked_at: set[str] = set()


@pytest.mark.parametrize("which", PEERS.values(), ids=list(PEERS))
def test_a_key_that_is_converted_together_with_others_is_looked_at(which: Peer) -> None:
    looked_at.clear()
    for given in SITUATIONS[which.name]:
        for make in which.together:
            make(Watched("file", given, which.by_key, 1))
    together = {r.theirs for r in which.rows if r.ours and r.value is None and r.how != "by hand"}
    assert sorted(together - looked_at) == []


def test_names_for_files() -> None:
    assert values.run_name("Qwen/GRPO: try 2") == "Qwen-GRPO-try-2"
    assert values.run_name("///") is None


# ---- against the peers themselves ----


def test_defaults_are_trls() -> None:
    config = peer("trl").GRPOConfig
    fields = {field.name: field for field in dataclasses.fields(config)}
    beside = {"warmup_ratio", "max_prompt_length"}  # of older versions
    of_command_line = {
        *(
            "model_name_or_path",
            "dataset_name",
            "dataset_config",
            "dataset_train_split",
            "use_peft",
            "lora_r",
            "lora_alpha",
        ),
        *("lora_target_modules", "lora_dropout", "load_in_4bit", "load_in_8bit"),
    }
    for row in PEERS["trl"].rows:
        if row.is_silent or row.theirs in beside | of_command_line:
            continue
        default = fields[row.theirs].default
        assert default == row.default or row.default is None, row.theirs
    parameters = {field.name: field for field in dataclasses.fields(peer("trl").ModelConfig)}
    for name in ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "load_in_4bit"):
        assert parameters[name].default == PEERS["trl"].by_key[name].default
    unknown = [name for name in fields if PEERS["trl"].row(name) is None]
    assert unknown == []


def test_trls_own_dump_is_converted_with_its_own_arithmetic(tmp_path: Path) -> None:
    config = peer("trl").GRPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=8,
        num_generations=8,
        loss_type="dr_grpo",
    )
    file = tmp_path / "config.json"
    file.write_text(config.to_json_string())
    assert "steps_per_generation" in json.loads(file.read_text())
    made = convert_file(file)
    prompts = config.generation_batch_size // config.num_generations
    assert made.settings["trainer.batch_size"] == prompts == 4
    assert made.settings["trainer.updates_per_batch"] == 4
    assert {note.theirs for note in made.notes} == {
        *("model.path", "data.files", "rewards", "inference.endpoints")
    }


@pytest.mark.parametrize("name", ["ppo", "ppo_megatron"])
def test_defaults_are_verls_and_its_whole_file_is_converted(name: str) -> None:
    file = peer_folder("verl") / "trainer" / "config" / f"_generated_{name}_trainer.yaml"
    table = PEERS["verl"].by_key
    theirs = flat(read_tree(file), table)
    for key, value in theirs.items():
        row = PEERS["verl"].row(key)
        assert row is not None, key
        if "*" not in row.theirs and row.default is not None and "megatron" not in name:
            assert row.default == value or float(row.default) == float(value), key
    made = convert_file(file)
    assert made.settings["trainer.batch_size"] == theirs["data.train_batch_size"]
    told = {note.theirs for note in made.notes} - {"rewards", "inference.endpoints"}
    assert told <= {
        "actor_rollout_ref.actor.clip_ratio_c",  # with its default estimator, gae
        "actor_rollout_ref.actor.optim.optimizer",
    }
