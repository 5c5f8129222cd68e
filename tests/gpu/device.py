"""The device of the GPU tests, and what they skip without.

``EASYRL_TEST_DEVICE=cpu`` runs those that do not need CUDA's own kernels on a CPU, to try the tests
themselves.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("EASYRL_TEST_DEVICE", "cuda")
ON_CUDA = DEVICE == "cuda"

marks = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_CUDA and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
