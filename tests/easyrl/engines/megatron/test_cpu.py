"""What megatron-core asks of CUDA goes to the CPU, and all else stays as it is."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.easyrl.engines.test_deepspeed_engine import ROOT

# In a process of its own, in which nothing was made before: what torch remembers of its functions.
PROGRAM = """
import torch
from easyrl.engines.megatron.cpu import redirect_cuda

redirect_cuda()
made = torch.empty, torch.zeros, torch.ones, lambda n, **k: torch.full((n,), 1.0, **k)
print({make(2, device="cuda").device.type for make in made})
print(torch.tensor([1.0], device="cuda:0").device.type, torch.ones(1).cuda().device.type)
with torch.device("meta"):
    print({make(2).device.type for make in made}, torch.tensor([1.0]).device.type)
print({make(2).device.type for make in made}, torch.ones(2, device="meta").device.type)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is redirected where CUDA is")
def test_only_what_names_cuda_is_redirected() -> None:
    """A model is made on the device ``meta`` before its weights are read (transformers)."""
    command = [sys.executable, "-c", PROGRAM]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert finished.stdout.splitlines() == [
        "{'cpu'}",
        "cpu cpu",
        "{'meta'} meta",
        "{'cpu'} meta",
    ], finished.stderr
