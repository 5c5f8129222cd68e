"""Which reference model a checkpoint was trained with."""

from pathlib import Path

import pytest
from blake3 import blake3

from easyrl.build.ledger import reference_identity
from easyrl.config import Config
from easyrl.config.file import validate_config
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks


def config(
    model: Path, kl_coef: float = 0.1, more: dict[str, object] | None = None, **settings: object
) -> Config:
    return validate_config(
        {
            "model": {"path": str(model), **settings},
            "data": {"files": ["prompts.jsonl"]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "recipe": {"kl_coef": kl_coef},
        }
        | (more or {})
    )


@pytest.mark.parametrize("name", ["model-1.safetensors", "pytorch_model.bin", "weights.pth"])
def test_it_changes_with_every_kind_of_weight_file_and_no_other(tmp_path: Path, name: str) -> None:
    def identity() -> str | None:
        return reference_identity(config(tmp_path), Collectives(Ranks.data_parallel(0, 1)))

    (tmp_path / name).write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "folder.bin").mkdir()
    first = identity()
    files = f"{name}\0{blake3(b'weights').hexdigest()}\n"  # as checkpoints hold it
    assert first == blake3(files.encode()).hexdigest()
    (tmp_path / "config.json").write_text("{ }")
    assert identity() == first
    (tmp_path / name).write_bytes(b"others!")
    assert identity() != first
    assert (
        reference_identity(config(tmp_path, kl_coef=0.0), Collectives(Ranks.data_parallel(0, 1)))
        is None
    )
    # under an adapter the model is frozen too, and no checkpoint holds it
    with_adapter = config(tmp_path, kl_coef=0.0, lora={})
    assert reference_identity(with_adapter, Collectives(Ranks.data_parallel(0, 1))) == identity()


def test_under_a_critics_adapter_its_own_model_is_frozen(tmp_path: Path) -> None:
    policy, critic = tmp_path / "policy", tmp_path / "critic"
    for folder in (policy, critic):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
    ranks = Collectives(Ranks.data_parallel(0, 1))
    of_critic = {"recipe": {"name": "ppo"}, "critic": {"path": str(critic)}}

    def identity(**settings: object) -> str | None:
        return reference_identity(config(policy, more=of_critic, **settings), ranks)

    assert identity() is None  # all of it is trained, and in the checkpoint
    first = identity(lora={})
    (critic / "model.safetensors").write_bytes(b"others!")
    assert identity(lora={}) != first
