"""Layouts whose engine is held against DeepSpeed's, and the rows both are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.parts.layouts.cases import (
    ADAM,
    VOCAB_SIZE,
    Case,
    configuration,
    functions,
    updates,
)
from easyrl.config import Config
from easyrl.engines.megatron.layout import Layout
from easyrl.schema import FrozenLogprobs, MicroBatch
from tests.tiny_models import Family, save_tiny_model

SPLIT = {
    2: [
        Case("tp2sp", Layout(tensor=2, sequence_parallel=True)),
        Case("pp2", Layout(pipeline=2)),
        Case("pp2-flush", Layout(pipeline=2, schedule="flush")),
        Case("pp-uneven", Layout(pipeline=2, layers_per_stage=(3, 1)), tied=False),
        Case("pp2-interleaved", Layout(pipeline=2, chunks=2)),
        Case("dp2-zero3", Layout(data=2), zero_stage=3),
    ],
    4: [
        Case("tp2sp-pp2-interleaved", Layout(2, 2, chunks=2, sequence_parallel=True)),
        Case("pp2dp2", Layout(pipeline=2, data=2), tied=False),
        Case("pp2dp2-bf16", Layout(pipeline=2, data=2), dtype="bf16"),
        Case("tp2dp2-zero3", Layout(tensor=2, data=2), zero_stage=3, tied=False),
    ],
}
RECOMPUTED = [
    Case("tp2", Layout(tensor=2)),
    Case("pp2", Layout(pipeline=2)),
    Case("tp2sp", Layout(tensor=2, sequence_parallel=True)),
]
FAMILIES: list[tuple[Family, bool]] = [
    ("llama", False),
    ("mistral", False),
    ("qwen2", True),
    ("qwen3", False),
]
FAMILY_LAYOUTS = {"tp2": Layout(tensor=2), "pp2": Layout(pipeline=2)}


class Update(NamedTuple):
    """The rows of an update, on the CPU, and its tokens."""

    rows: list[MicroBatch]
    denominator: float


def alone(case: Case) -> Case:
    """DeepSpeed's engine on one process, in fp32."""
    return Case("alone", Layout(), 0, "fp32", case.tied)


def update(folder: Path, case: Case, number: int) -> Update:
    """Three rows of groups and a dummy: two for each of two data-parallel ranks."""
    groups, made = updates()[number], functions(folder, case)
    rows = made.pack(made.trained(groups, (), ()))
    assert len(rows) == 3
    return Update([*rows, made.dummy()], made.denominator(groups))


def with_infinite_loss(row: MicroBatch) -> MicroBatch:
    return replace(row, advantages=torch.full_like(row.advantages, torch.inf))


def partly_known(rows: list[MicroBatch], said: list[FrozenLogprobs]) -> list[MicroBatch]:
    """Of every other row all that the frozen models say, of another the reference's alone."""
    known = [None, *said[1::2], replace(said[2], old_policy=None)]
    places = [0, *range(1, len(rows), 2), 2]
    found = list(rows)
    for place, frozen in zip(places, known, strict=True):
        found[place] = replace(rows[place], frozen=frozen)
    return found


def family_folder(folder: Path, family: Family) -> Path:
    return folder / f"family-{family}"


def save_families(folder: Path) -> None:
    for family, tied in FAMILIES:
        path = family_folder(folder, family)
        save_tiny_model(path, family, tied=tied, vocab_size=VOCAB_SIZE, num_hidden_layers=4)


def config_of(folder: Path, case: Case, **model: Any) -> Config:
    """With other settings of ``model``."""
    config = configuration(folder, case, ADAM)
    return config.model_copy(update={"model": config.model.model_copy(update=model)})
