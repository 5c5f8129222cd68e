"""The device of the GPU tests.

``EASYRL_TEST_DEVICE=cpu`` runs those that do not need CUDA's own kernels on a CPU, to try the tests
themselves.
"""

from __future__ import annotations

import os

import pytest

DEVICE = os.environ.get("EASYRL_TEST_DEVICE", "cuda")
ON_CUDA = DEVICE == "cuda"

marks = [pytest.mark.gpu]  # without a CUDA device they are skipped: tests/conftest.py
