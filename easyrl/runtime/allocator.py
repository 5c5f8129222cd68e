"""How CUDA's memory is allocated: in segments that grow.

Packed rows have ever new lengths, and with segments of fixed sizes the gaps between tensors of
other sizes are lost to all others: runs fail with gigabytes reserved and free.
"""

from __future__ import annotations

from collections.abc import MutableMapping

# The name that every torch from 2.8 on reads; PYTORCH_ALLOC_CONF, the newer one, is read after it.
CUDA_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"
OTHER_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


def use_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Asks torch for them, unless the user has settings of their own.

    To be called before the first tensor is on a device: it is then that torch reads it.
    """
    if not any(name in environment for name in (CUDA_SETTINGS, *OTHER_NAMES)):
        environment[CUDA_SETTINGS] = EXPANDABLE
