"""The gradient at a position that predicts the first token of many responses."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.policy_model import PolicyModel
from easyrl.models.row_forward import PackedForward

RESPONSES = 257


class SumsByIndex(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(("aten.index_add", "aten.index_put", "aten.scatter_add")):
            self.dtypes.append(result.dtype)
        return result


def test_is_summed_in_float32() -> None:
    """Added in bfloat16 one by one, as CUDA's ``index_add_`` does, 1 + 256 · 2⁻⁹ stays 1; the
    CPU's rounds once, so its dtype is looked at, too."""
    hidden = torch.ones(1, 2, 8, dtype=torch.bfloat16, requires_grad=True)

    def head(rows: Tensor, *_: object) -> tuple[Tensor]:
        return (rows,)

    model = SimpleNamespace(
        model=SimpleNamespace(
            base_model=lambda **_: SimpleNamespace(last_hidden_state=hidden),
            get_output_embeddings=lambda: head,
        ),
        row_forward=PackedForward(CheckedAttention()),
    )
    (rows,) = PolicyModel.forward(
        model,  # type: ignore[arg-type]
        input_ids=torch.zeros(2, dtype=torch.int64),
        position_ids=torch.arange(2),
        layout=SegmentLayout([(0, 2, -1)]),
        predictor_index=torch.ones(RESPONSES, dtype=torch.int64),
        label_ids=torch.zeros(RESPONSES, dtype=torch.int64),
        temperature=1.0,
    )
    weights = torch.full((RESPONSES, 8), 2.0**-9, dtype=torch.bfloat16)
    weights[0] = 1
    with SumsByIndex() as sums:
        (grad,) = torch.autograd.grad((rows * weights).sum(), hidden)
    assert sums.dtypes == [torch.float32]
    assert grad[0, :, 0].tolist() == [0.0, 1.5]
