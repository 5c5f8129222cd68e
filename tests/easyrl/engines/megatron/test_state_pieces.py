"""Pieces of a checkpoint of split models: every element once, and in any other layout."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from easyrl.engines.base import Columns, StatePiece
from easyrl.engines.deepspeed.pieces import MASTER, copy_pieces, read_pieces
from easyrl.engines.deepspeed.shards import Fragment
from easyrl.engines.megatron.weights.fragments import tensor_fragments, told_by
from easyrl.engines.megatron.weights.mapping import Rule, Split, rules
from easyrl.engines.megatron.weights.pieces import TensorRank, pieces
from easyrl.engines.state_file import EngineState, StateReader
from tests.easyrl.engines.megatron.test_weight_pieces import shard

NUM_KV_HEADS, NUM_PARTITIONS = 2, 3
SIZES = (1, 2, 4)  # the last: more ranks than key-value heads
NORM = Rule("decoder.layers.0.self_attention.q_layernorm.weight", ("q_norm",), Split.WHOLE)
# Rows that no cut ends with, a vocabulary that no number of ranks divides.
SHAPES = {
    "model.embed_tokens.weight": (13, 10),
    "model.layers.0.self_attn.q_proj.weight": (16, 10),
    "model.layers.0.self_attn.k_proj.weight": (8, 10),
    "model.layers.0.self_attn.v_proj.weight": (8, 10),
    "model.layers.0.self_attn.q_proj.bias": (16,),
    "model.layers.0.self_attn.k_proj.bias": (8,),
    "model.layers.0.self_attn.v_proj.bias": (8,),
    "model.layers.0.self_attn.o_proj.weight": (10, 16),
    "model.layers.0.input_layernorm.weight": (10,),
    "model.layers.0.post_attention_layernorm.weight": (10,),
    "model.layers.0.mlp.gate_proj.weight": (12, 10),
    "model.layers.0.mlp.up_proj.weight": (12, 10),
    "model.layers.0.mlp.down_proj.weight": (10, 12),
    "model.norm.weight": (10,),
    "q_norm": (4,),
}
TABLE = rules("Qwen2ForCausalLM", 1, tied=True) | {NORM.parameter: NORM}  # the copy among them


class Partition(NamedTuple):
    """What one process has: a range of its flattened parameters, one behind the other."""

    values: Tensor
    held: list[Fragment]
    saved: list[Fragment]


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """Each element another number."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    parts = (torch.randperm(sum(sizes)).float() + 1).split(sizes)
    return {n: p.view(shape) for (n, shape), p in zip(SHAPES.items(), parts, strict=True)}


def partitions(tensors: dict[str, Tensor], size: int, seed: int) -> Iterator[Partition]:
    """Of all tensor ranks and data-parallel ones, with random cuts."""
    for rank in range(size):
        place = TensorRank(rank, size)
        held = {name: pieces(rule, SHAPES, place, NUM_KV_HEADS) for name, rule in TABLE.items()}
        own = {name: shard(rule, tensors, place).zero_() for name, rule in TABLE.items()}
        for name, parameter in own.items():
            for piece in held[name]:
                piece.of_parameter(parameter).copy_(piece.of_tensor(tensors[piece.tensor]))
        whole = torch.cat([parameter.flatten() for parameter in own.values()])
        cuts = random.Random(seed).sample(range(len(whole)), NUM_PARTITIONS - 1)
        saved_here = told_by(TABLE, rank)
        for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(whole)], strict=True):
            fragments, saved, at = [], [], 0
            for name, parameter in own.items():
                low, high = max(begin, at), min(end, at + parameter.numel())
                if low < high:
                    local = Fragment(name, low - at, high - low, low - begin)
                    told = list(tensor_fragments(local, held[name], SHAPES))
                    fragments += told
                    saved += told if name in saved_here else []
                at += parameter.numel()
            yield Partition(whole[begin:end], fragments, saved)


def places(piece: StatePiece) -> Tensor:
    """Of its elements in the whole flattened tensor."""
    numbers = torch.arange(piece.start, piece.start + len(piece.values))
    if piece.columns is None:
        return numbers
    first, width, of = piece.columns
    return numbers // width * of + first + numbers % width


def problems(saved: list[StatePiece], tensors: dict[str, Tensor]) -> list[str]:
    """Elements that are saved never, twice, with another's value, or beside the tensor."""
    times = {name: torch.zeros(tensor.numel()) for name, tensor in tensors.items()}
    wrong = []
    for piece in saved:
        name = piece.key.removeprefix(f"{MASTER}/")
        where, numel = places(piece), tensors[name].numel()
        if where.min() < 0 or where.max() >= numel:
            wrong.append(f"place in {name}")
            continue
        if not tensors[name].flatten()[where].equal(piece.values):
            wrong.append(f"values of {name}")
        times[name][where] += 1
    return wrong + [f"times of {name}" for name, counted in times.items() if (counted != 1).any()]


def saved_pieces(all_of: list[Partition]) -> list[list[StatePiece]]:
    return [list(copy_pieces(MASTER, part.values, part.saved)) for part in all_of]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(10))
def test_each_element_is_saved_once(tensors: dict[str, Tensor], size: int, seed: int) -> None:
    by_process = saved_pieces(list(partitions(tensors, size, seed)))
    assert problems(sum(by_process, []), tensors) == []
    for of_process in by_process:
        keys = [piece.key for piece in of_process]
        assert len(keys) == len(set(keys))
    columns = {piece.key for piece in sum(by_process, []) if piece.columns is not None}
    split = {
        f"{MASTER}/model.layers.0.{name}.weight" for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    assert columns == (split if size > 1 else set())


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f._replace(start=f.start + 1),
        lambda f: f._replace(offset=f.offset + 1),
        lambda f: f._replace(numel=f.numel - 1),
        lambda f: f._replace(columns=f.columns and f.columns._replace(first=f.columns.first - 1)),
        lambda f: f._replace(columns=f.columns and f.columns._replace(of=f.columns.of - 1)),
    ],
    ids=["start", "offset", "numel", "first", "of"],
)
def test_an_element_beside_it_is_seen(tensors: dict[str, Tensor], change: object) -> None:
    assert callable(change)
    *others, last = partitions(tensors, 2, 0)
    *firsts, of_columns = sorted(last.saved, key=lambda f: f.columns is not None)
    assert of_columns.columns is not None
    spoilt = last._replace(saved=[*firsts, change(of_columns)])
    pieces_of_all = sum(saved_pieces([*others, spoilt]), [])
    assert any("o_proj" in each or "down_proj" in each for each in problems(pieces_of_all, tensors))


@pytest.mark.parametrize(("written", "read"), product(SIZES, SIZES))
def test_another_layout_reads_it(
    tensors: dict[str, Tensor], tmp_path: Path, written: int, read: int
) -> None:
    """To the bit, what pads the vocabulary zero; and each tensor whole, in parts and in columns."""
    files = write(tmp_path, saved_pieces(list(partitions(tensors, written, 1))))
    with closing(StateReader(files, {})) as saved:
        for part in partitions(tensors, read, 2):
            got = torch.full_like(part.values, torch.nan)
            read_pieces(MASTER, got, part.held, saved)
            assert got.equal(part.values)
        rng = random.Random(3)
        for name, tensor in tensors.items():
            key, flat = f"{MASTER}/{name}", tensor.flatten()
            assert saved.numel(key) == len(flat)
            assert saved.read(key, 0, len(flat)).equal(flat)
            start, end = sorted(rng.choices(range(len(flat) + 1), k=2))
            assert saved.read(key, start, end - start).equal(flat[start:end])
            if tensor.ndim == 2:
                left, right = sorted(rng.sample(range(tensor.shape[1] + 1), 2))
                own = tensor[:, left:right].flatten()
                start, end = sorted(rng.choices(range(len(own) + 1), k=2))
                columns = Columns(left, right - left, tensor.shape[1])
                assert saved.read(key, start, end - start, columns).equal(own[start:end])


def test_what_lacks_is_named(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    by_process = saved_pieces(list(partitions(tensors, 2, 1)))
    key = f"{MASTER}/model.layers.0.mlp.down_proj.weight"
    keys = [{piece.key for piece in of_process} for of_process in by_process]
    lost = next(n for n, of_process in enumerate(keys) if key in of_process)
    files = write(tmp_path, by_process)
    with closing(StateReader([f for n, f in enumerate(files) if n != lost], {})) as saved:
        with pytest.raises(ValueError, match=f"lacks elements 0 and on of {key}"):
            saved.read(key, 0, 120)
    with closing(StateReader(files, {})) as saved:
        with pytest.raises(ValueError, match=f"{key} has 12 columns, now 10"):
            saved.read(key, 0, 5, Columns(0, 5, 10))


def test_a_reader_that_knows_no_columns_refuses_them(tmp_path: Path) -> None:
    """``torch.distributed.checkpoint`` would put them into the wrong places."""
    write(tmp_path, [[StatePiece("a", 0, torch.ones(6), Columns(0, 2, 4))]])
    with pytest.raises(CheckpointException, match="metadata read failed: .a."):
        dcp.load(
            {"a": torch.zeros(12)},
            storage_reader=HuggingFaceStorageReader(str(tmp_path)),
            no_dist=True,
        )


def write(folder: Path, by_process: list[list[StatePiece]]) -> list[Path]:
    states = [EngineState(of_process, {}) for of_process in by_process]
    files = [state.write(folder, f"process-{n}") for n, state in enumerate(states)]
    return [folder / file.name for (file,) in files]
