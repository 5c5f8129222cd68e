"""Which rows and columns of a checkpoint tensor-parallel ranks have: all, once, and back to the
bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from easyrl.config import ConfigError
from easyrl.engines.megatron.layout import Layout
from easyrl.engines.megatron.weights.loading import load_parameters, stored_shapes
from easyrl.engines.megatron.weights.mapping import Rule, Split, rules
from easyrl.engines.megatron.weights.pieces import TensorRank, padded_size, pieces
from tests.tiny_models import Family, tiny_model

ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
NUM_KV_HEADS = 2


def shard(rule: Rule, tensors: dict[str, Tensor], place: TensorRank) -> Tensor:
    """A rank's parameter, of the right size and filled with what no weight is."""
    first = tensors[rule.tensors[0]]
    rows = sum(tensors[name].shape[0] for name in rule.tensors)
    shape = list(first.shape)
    if rule.split is Split.COLUMNS:
        shape[1] //= place.size
    elif rule.split is Split.ROWS:
        shape[0] = padded_size(rows, place.size) // place.size
    elif rule.split is not Split.WHOLE:
        shape[0] = rows // place.size
    return torch.full(shape, torch.nan)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_loaded_by_all_ranks_and_put_together_again(
    tmp_path: Path, family: Family, num_ranks: int, tied: bool
) -> None:
    model = tiny_model(family, tied=tied)
    model.save_pretrained(tmp_path)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    shapes = stored_shapes(tmp_path)
    assert {name: list(t.shape) for name, t in tensors.items()} == shapes
    table = rules(ARCHITECTURES[family], 2, tied=tied)
    assert {name for rule in table.values() for name in rule.tensors} == set(tensors)
    covered = {name: torch.zeros_like(t) for name, t in tensors.items()}
    again = {name: torch.zeros_like(t) for name, t in tensors.items()}
    for rank in range(num_ranks):
        place = TensorRank(rank, num_ranks)
        own = {name: shard(rule, tensors, place) for name, rule in table.items()}
        load_parameters(own, table, tmp_path, place, NUM_KV_HEADS)
        for name, rule in table.items():
            assert not own[name].isnan().any(), name
            if tied and name == "output_layer.weight":
                continue  # the embedding's copy
            for piece in pieces(rule, shapes, place, NUM_KV_HEADS):
                piece.of_tensor(covered[piece.tensor]).add_(1)
                piece.of_tensor(again[piece.tensor]).copy_(piece.of_parameter(own[name]))
    for name, tensor in tensors.items():
        assert again[name].equal(tensor)
        times = num_ranks if tensor.ndim == 1 and "proj" not in name else 1
        assert (covered[name] == times).all(), name


def test_heads_are_interleaved_by_key_value_head() -> None:
    """Four query heads of one row each over two key-value heads: q0 q1 k0 v0 q2 q3 k1 v1."""
    rule = Rule("qkv", ("q", "k", "v"), Split.BY_KV_GROUP)
    shapes = {"q": [4, 1], "k": [2, 1], "v": [2, 1]}
    order = ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]
    for num_ranks in (1, 2, 4, 8):
        found = []
        for rank in range(num_ranks):
            held = pieces(rule, shapes, TensorRank(rank, num_ranks), 2)
            rows = [""] * (8 // num_ranks)
            for piece in held:
                for row in range(piece.size):
                    rows[piece.at + row] = f"{piece.tensor}{piece.start + row}"
            found += rows
        assert found == order


def test_gate_and_up_lie_one_behind_the_other_in_each_rank() -> None:
    rule = Rule("fc1", ("gate", "up"), Split.EACH_ROWS)
    (gate, up) = pieces(rule, {"gate": [6, 4], "up": [6, 4]}, TensorRank(1, 2), 1)
    assert (gate.tensor, gate.start, gate.at, gate.size) == ("gate", 3, 0, 3)
    assert (up.tensor, up.start, up.at, up.size) == ("up", 3, 3, 3)


def test_what_cannot_be_shared_is_said() -> None:
    with pytest.raises(ValueError, match="down: 6 cannot be shared by 4 ranks"):
        pieces(Rule("fc2", ("down",), Split.COLUMNS), {"down": [4, 6]}, TensorRank(0, 4), 1)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"other": torch.zeros(4)}, "has no norm; fetch the model again"),
        ({"norm": torch.zeros(5)}, r"of other shapes than its config.json says: norm is \[5\]"),
        ({"norm": torch.zeros(3)}, r"of other shapes than its config.json says: norm is \[3\]"),
    ],
    ids=["missing", "longer", "shorter"],
)
def test_files_that_do_not_fit_are_an_error(
    tmp_path: Path, stored: dict[str, Tensor], message: str
) -> None:
    save_file(stored, tmp_path / "model.safetensors")
    table = {"norm": Rule("norm", ("norm",), Split.WHOLE)}
    with pytest.raises(ConfigError, match=message):
        load_parameters({"norm": torch.zeros(4)}, table, tmp_path, TensorRank(0, 1), 1)


def test_a_layout_places_each_process_once() -> None:
    layout = Layout(tensor=2, pipeline=3, data=2)
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert [layout.rank(p.tensor, p.data, p.stage) for p in places] == list(range(12))
    assert [(p.tensor, p.data, p.stage) for p in places[:5]] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
        (0, 0, 1),
    ]
    heads = [p.ranks for p in places if p.is_head]
    assert [(r.dp_rank, r.dp_size, r.is_head) for r in heads] == [(0, 2, True), (1, 2, True)]
