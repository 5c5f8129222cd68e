"""A frozen model whose weights stay in host memory and visit the device layer by layer.

All rows go through a layer while its weights are there, and the next layer's are copied meanwhile:
the weights travel once for any number of rows, and never more than two layers are on the device.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.last_layer import gather_predictors
from easyrl.models.policy_model import PolicyModel
from easyrl.models.row_forward import PackedForward
from easyrl.schema import MicroBatch

ALIGNMENT = 256  # bytes, as the device's allocator aligns a tensor


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter, its values on the host, and where they go in a buffer on the device."""

    parameter: nn.Parameter
    host: Tensor
    offset: int  # bytes

    def within(self, buffer: Tensor) -> Tensor:
        part = buffer[self.offset : self.offset + self.host.nbytes]
        return part.view(self.host.dtype).view(self.host.shape)


class OffloadedModel:
    """``model`` frozen, its weights in page-locked memory where ``device`` is not the CPU itself.

    On a CPU the same copies are made, so that the same code is run and its bits can be compared.
    """

    def __init__(self, model: PolicyModel, device: torch.device) -> None:
        model.requires_grad_(False).eval()
        assert isinstance(model.row_forward, PackedForward)
        self._forward, self._device = model.row_forward, device
        for parameter in model.parameters():  # a tied one once
            if device.type != "cpu":
                parameter.data = parameter.data.pin_memory()
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))  # small, and used by every layer
        base: Any = model.model.base_model
        ends: list[Any] = [base.norm, model.model.get_output_embeddings()]
        self._model, self._base = model.model, base
        self._layers: list[nn.Module] = [base.embed_tokens, *base.layers, *ends]
        self._weights = [_weights_of(layer) for layer in self._layers]

    @torch.no_grad()
    def logprobs(
        self, rows: Sequence[tuple[MicroBatch, SegmentLayout]], temperature: float
    ) -> list[Tensor]:
        """Of each row on the device, log-probabilities float32 [N]; zeros of dummies, unrun.

        The computation is that of ``PolicyModel.forward`` on each row, to the bit.
        """
        results = [torch.zeros(row.num_loss_tokens, device=self._device) for row, _ in rows]
        run = [i for i, (row, _) in enumerate(rows) if not row.is_dummy]
        if not run:
            return results
        with closing(self._visits()) as visits:
            embed = next(visits)
            hidden = {i: embed(rows[i][0].input_ids[None]) for i in run}
            positions = {i: rows[i][0].position_ids[None] for i in run}
            wanted = {
                i: self._forward.wanted(self._model, rows[i][1], rows[i][0].predictor_index)
                for i in run
            }
            rotations = {i: self._base.rotary_emb(hidden[i], positions[i]) for i in run}
            for _ in self._base.layers:
                layer = next(visits)
                for i in run:
                    hidden[i] = layer(
                        hidden[i],
                        attention_mask=None,
                        position_embeddings=rotations[i],
                        position_ids=positions[i],
                        use_cache=False,
                        layout=rows[i][1],
                        checked_attention=self._forward.attention,
                        wanted=wanted[i],
                    )
            norm = next(visits)
            hidden = {i: norm(hidden[i])[0] for i in run}
            head = next(visits)
            for i in run:
                row = rows[i][0]
                predictors = gather_predictors(hidden[i], row.predictor_index, wanted[i])
                results[i], _ = head(predictors, row.label_ids, temperature)
        return results

    def _visits(self) -> Generator[nn.Module, None, None]:
        """Each layer in turn; its weights are on the device until the next one is asked for."""
        device = torch.get_device_module(self._device)
        side, current = device.Stream(), device.current_stream()
        largest = max(_nbytes(weights) for weights in self._weights)
        buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]

        def copy(index: int) -> None:
            # Into the buffer of the layer before last, whose work was launched before.
            side.wait_stream(current)
            with device.stream(side):
                for weight in self._weights[index]:
                    weight.within(buffers[index % 2]).copy_(weight.host, non_blocking=True)

        copy(0)
        for index, layer in enumerate(self._layers):
            current.wait_stream(side)
            if index + 1 < len(self._layers):
                copy(index + 1)
            with _placed(self._weights[index], buffers[index % 2]):
                yield layer


@contextmanager
def _placed(weights: Sequence[_Weight], buffer: Tensor) -> Iterator[None]:
    try:
        for weight in weights:
            weight.parameter.data = weight.within(buffer)
        yield
    finally:
        for weight in weights:
            weight.parameter.data = weight.host


def _weights_of(layer: nn.Module) -> list[_Weight]:
    weights: list[_Weight] = []
    for parameter in layer.parameters():
        weights.append(_Weight(parameter, parameter.data, _nbytes(weights)))
    return weights


def _nbytes(weights: Sequence[_Weight]) -> int:
    """Of a buffer that holds them."""
    if not weights:
        return 0
    end = weights[-1].offset + weights[-1].host.nbytes
    return -(-end // ALIGNMENT) * ALIGNMENT
