"""Visibly changed weights, for the proof that an endpoint serves what it was sent."""

from __future__ import annotations

import hashlib


def perturbation(name: str) -> float:
    """``1 + 0.05 u`` with ``0.3 <= |u| <= 1`` from a hash of ``name``: always to be seen."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    magnitude = 0.3 + 0.7 * int.from_bytes(digest[:4], "little") / 2**32
    sign = 1 if digest[4] & 1 else -1
    return 1 + 0.05 * sign * magnitude
