"""The offloaded reference: the same bits as on the device, its weights copied once for all rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from easyrl.config import ModelConfig
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.loading import load_policy_model
from easyrl.models.offload import OffloadedModel
from easyrl.models.policy_model import PolicyModel
from easyrl.models.tri_model import TriModel, frozen_model
from easyrl.schema import MicroBatch
from tests.easyrl.engines.engine_cases import TEMPERATURE, streamed
from tests.tiny_models import FAMILIES, Family, save_tiny_model

CPU = torch.device("cpu")


def with_layouts(rows: list[MicroBatch]) -> list[tuple[MicroBatch, SegmentLayout]]:
    return [(row, SegmentLayout(row.segments)) for row in rows]


def load(folder: Path, family: Family, *, tied: bool = False, dtype: str = "fp32") -> PolicyModel:
    if not (folder / "config.json").exists():
        save_tiny_model(folder, family, tied=tied)
    return load_policy_model(ModelConfig(path=folder, dtype=dtype, attention="merged"))


def storages(model: PolicyModel) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "tied", "dtype"),
    [(family, False, "fp32") for family in FAMILIES]
    + [("qwen3", True, "fp32"), ("llama", False, "bf16")],
)
def test_bits_are_those_of_the_model_on_the_device(
    tmp_path: Path, family: Family, tied: bool, dtype: str
) -> None:
    rows = with_layouts(streamed("token"))
    assert len(rows) > 2
    plain = frozen_model(load(tmp_path, family, tied=tied, dtype=dtype))
    offloaded = OffloadedModel(load(tmp_path, family, dtype=dtype), CPU)
    got = offloaded.logprobs(rows, TEMPERATURE)
    for mine, expected in zip(got, plain.logprobs(rows, TEMPERATURE), strict=True):
        assert torch.equal(mine, expected) and mine.dtype == torch.float32
        assert not mine.requires_grad


def test_weights_are_on_the_host_between_uses(tmp_path: Path) -> None:
    model = load(tmp_path, "qwen3")
    offloaded, before = OffloadedModel(model, CPU), storages(model)
    at_use: list[int] = []
    for layer in model.model.base_model.layers:
        layer.register_forward_pre_hook(
            lambda module, _: at_use.extend(p.data_ptr() for p in module.parameters())
        )
    offloaded.logprobs(with_layouts(streamed("token")[:1]), TEMPERATURE)
    assert at_use and not set(at_use) & set(before.values())
    assert storages(model) == before


def test_weights_are_on_the_host_after_an_error(tmp_path: Path) -> None:
    model = load(tmp_path, "qwen3")
    offloaded, before = OffloadedModel(model, CPU), storages(model)

    def fail(*_: object) -> None:
        raise MemoryError

    hook = model.model.base_model.layers[1].register_forward_pre_hook(fail)
    rows = with_layouts(streamed("token")[:1])
    with pytest.raises(MemoryError):
        offloaded.logprobs(rows, TEMPERATURE)
    assert storages(model) == before
    hook.remove()
    assert torch.isfinite(offloaded.logprobs(rows, TEMPERATURE)[0]).all()


class RecordingDevice:
    """A device module whose streams write down what is launched in them."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def Stream(self) -> SimpleNamespace:  # noqa: N802, as torch names it
        return SimpleNamespace(wait_stream=lambda other: self.launched.append("copy waits"))

    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: self.launched.append("layer waits"))

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.launched.append("copy")
        yield


def test_next_layer_is_copied_while_all_rows_go_through_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tmp_path, "qwen3")
    offloaded, device = OffloadedModel(model, CPU), RecordingDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    for layer in offloaded._layers:
        layer.register_forward_pre_hook(lambda *_: device.launched.append("run"))
    rows = with_layouts(streamed("token")[:2])
    offloaded.logprobs(rows, TEMPERATURE)
    num_layers = len(offloaded._layers)
    assert num_layers == 2 + 3  # decoder layers, embeddings, norm, head
    copy = ["copy waits", "copy"]
    visit = ["layer waits", *copy, "run", "run"]
    assert device.launched == [*copy, *visit * (num_layers - 1), "layer waits", "run", "run"]


def test_dummies_are_not_run(tmp_path: Path) -> None:
    """A rank in lock-step that has no row left moves no weights for it."""
    offloaded = OffloadedModel(load(tmp_path, "qwen3"), CPU)
    row = streamed("token")[0]
    (alone,) = offloaded.logprobs(with_layouts([row]), TEMPERATURE)
    offloaded._layers[1].register_forward_pre_hook(lambda *_: ran.append(1))
    ran: list[int] = []
    dummy, beside = offloaded.logprobs(with_layouts([dummy_micro_batch(), row]), TEMPERATURE)
    assert len(ran) == 1 and torch.equal(beside, alone)
    (only,) = offloaded.logprobs(with_layouts([dummy_micro_batch()]), TEMPERATURE)
    assert len(ran) == 1 and torch.equal(only, dummy) and not only.any()


def test_rows_of_a_drain_share_one_journey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journeys: list[int] = []
    plain = OffloadedModel.logprobs

    def counted(self: OffloadedModel, rows: list, temperature: float) -> list[Tensor]:
        journeys.append(len(rows))
        return plain(self, rows, temperature)

    monkeypatch.setattr(OffloadedModel, "logprobs", counted)
    reference = OffloadedModel(load(tmp_path, "qwen3"), CPU)
    tri = TriModel(load(tmp_path, "qwen3"), reference, None, TEMPERATURE, CPU)
    rows = streamed("token")
    frozen = tri.frozen_logprobs_of(rows)
    assert journeys == [len(rows)] and len(frozen) == len(rows)
    for row, said in zip(rows, frozen, strict=True):
        again = tri.frozen_logprobs(row)
        assert said.reference is not None and again.reference is not None
        assert torch.equal(said.reference, again.reference) and said.old_policy is None
