"""Weights on their way from a GPU to page-locked memory; torch alone."""

from __future__ import annotations

import torch

from easyrl.engines.host_copies import HostCopy, one_ahead
from tests.gpu.device import DEVICE, ON_CUDA, marks

pytestmark = marks


def test_bytes_are_the_devices() -> None:
    weights = [torch.randn(3, 1000 + n, device=DEVICE).bfloat16().t() for n in range(5)]
    copies = (HostCopy({"weight": weight}) for weight in weights)
    for weight, values in zip(weights, one_ahead(copies), strict=True):
        assert torch.equal(values["weight"], weight.cpu())
        assert values["weight"].is_pinned() == ON_CUDA


def test_what_is_launched_later_does_not_show() -> None:
    """Neither new values nor the memory of freed tensors."""
    for _ in range(20):
        weight = torch.ones(2**24, device=DEVICE)
        weight.mul_(3)
        copy = HostCopy({"weight": weight})
        weight.zero_()
        del weight
        torch.full((2**24,), 5.0, device=DEVICE)
        assert bool((copy.ready()["weight"] == 3).all())
