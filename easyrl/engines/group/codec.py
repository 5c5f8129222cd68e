"""Calls and their results as JSON and tensors: what the processes of a group tell each other."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from easyrl.engines.base import LogprobComparison, MetricSums, ResponseDifference, StateFile
from easyrl.schema import FrozenLogprobs, MicroBatch, SampleKey, Segment

RECORDS: dict[str, Any] = {
    record.__name__: record
    for record in (
        FrozenLogprobs,
        LogprobComparison,
        MetricSums,
        MicroBatch,
        ResponseDifference,
        SampleKey,
        Segment,
        StateFile,
    )
}
KIND, MESSAGE = "kind", "message"  # of an entry of JSON; of a tensor's name


def encode(value: Any) -> bytes:
    """``value``: JSON, tensors, tuples and ``RECORDS``, in each other."""
    tensors: list[Tensor] = []
    message = json.dumps(_plain(value, tensors)).encode()  # json: metrics may be NaN
    named = {str(number): tensor for number, tensor in enumerate(tensors)}
    return save({MESSAGE: torch.frombuffer(bytearray(message), dtype=torch.uint8), **named})


def decode(data: bytes) -> Any:
    """Inverse of ``encode``; tensors are on the CPU."""
    tensors = load(data)
    message = tensors.pop(MESSAGE).numpy().tobytes()
    return _records(json.loads(message), tensors)


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().contiguous().clone())  # the format takes no views
        return {KIND: "Tensor", "number": str(len(tensors) - 1)}
    if is_dataclass(value) and not isinstance(value, type):
        assert type(value).__name__ in RECORDS, type(value)
        values = {f.name: _plain(getattr(value, f.name), tensors) for f in fields(value)}
        return {KIND: type(value).__name__, "values": values}
    if isinstance(value, tuple):
        name = type(value).__name__
        assert name == "tuple" or name in RECORDS, type(value)
        return {KIND: name, "values": [_plain(each, tensors) for each in value]}
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        values = {key: _plain(each, tensors) for key, each in value.items()}
        return {KIND: "dict", "values": values}
    if isinstance(value, list):
        return [_plain(each, tensors) for each in value]
    assert value is None or isinstance(value, bool | int | float | str), type(value)
    return value


def _records(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_records(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value[KIND]
    if kind == "Tensor":
        return tensors[value["number"]]
    values = value["values"]
    if isinstance(values, list):
        parts = [_records(each, tensors) for each in values]
        return tuple(parts) if kind == "tuple" else RECORDS[kind](*parts)
    named = {name: _records(each, tensors) for name, each in values.items()}
    return named if kind == "dict" else RECORDS[kind](**named)
