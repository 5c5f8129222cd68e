"""Layouts whose checkpoints are exchanged, and the names of what is left on the disk."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.parts.layouts.cases import Case
from easyrl.engines.megatron.layout import Layout

MODELS = [(tied, dtype) for tied in (True, False) for dtype in ("fp32", "bf16")]
# A wrong position of the schedule shows: each step has another rate.
ADAM = {
    "learning_rate": 1e-3,
    "adam_eps": 1e-3,
    "weight_decay": 0.1,
    "lr_schedule": "linear",
    "warmup_steps": 3,
    "max_steps": 8,
}
WRITTEN = "tp2pp2"
IN_FP32 = {
    "dp4": (Layout(data=4), 2),
    "tp4": (Layout(tensor=4), 1),
    "tp2dp2-zero3": (Layout(tensor=2, data=2), 3),
    "tp2pp2-interleaved": (Layout(tensor=2, pipeline=2, chunks=2), 1),
    "pp2dp2-uneven": (Layout(pipeline=2, data=2, layers_per_stage=(1, 3)), 1),
}
UNTIED_IN_FP32 = {name: IN_FP32[name] for name in ("dp4", "tp2dp2-zero3")}
IN_BF16 = {"dp4": (Layout(data=4), 2), "tp2dp2-zero1": (Layout(tensor=2, data=2), 1)}


def written(tied: bool, dtype: str) -> Case:
    """Which layout the checkpoints are of first."""
    return Case(WRITTEN, Layout(tensor=2, pipeline=2), 1, dtype, tied)


def others(tied: bool, dtype: str) -> list[Case]:
    """That read them on as many processes."""
    layouts = IN_BF16 if dtype == "bf16" else IN_FP32 if tied else UNTIED_IN_FP32
    return [Case(name, layout, stage, dtype, tied) for name, (layout, stage) in layouts.items()]


def alone(tied: bool, dtype: str) -> Case:
    """DeepSpeed's engine on one process; bf16 needs ZeRO."""
    return Case("alone", Layout(), 0 if dtype == "fp32" else 1, dtype, tied)


def back(tied: bool, dtype: str) -> Case:
    return replace(written(tied, dtype), name="back")


def saved_name(case: Case, step: int) -> str:
    """Of the folder with a checkpoint and the weights, behind so many steps."""
    return f"{case.name}-{'tied' if case.tied else 'untied'}-{case.dtype}-step-{step}"
