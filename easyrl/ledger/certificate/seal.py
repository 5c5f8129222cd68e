"""The seal of a certificate: an HMAC-SHA256 of each line, by a key from outside the run's folder.

The chain of hashes shows accidents and edits; who can write the folder can also build it anew. With
a seal that takes the key, too.
"""

from __future__ import annotations

import hmac
from pathlib import Path

FEWEST_KEY_BYTES = 16


class SealKey:
    """A secret; not shown by ``repr``."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def seal(self, data: bytes) -> bytes:
        """HMAC-SHA256 of ``data``, 64 hex digits."""
        return hmac.digest(self._key, data, "sha256").hex().encode()


def read_seal_key(file: Path, run_dir: Path) -> SealKey:
    """The key in ``file``: its bytes without white space around them.

    Raises ``ValueError`` naming the file if it cannot be read, is too short, or lies in the run's
    folder, where whoever rewrites the certificate finds it.
    """
    if file.resolve().is_relative_to(run_dir.resolve()):
        raise ValueError(f"--seal: {file} lies in the run's folder {run_dir}; keep it elsewhere")
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"--seal: {file} cannot be read ({error.strerror})") from None
    if len(key) < FEWEST_KEY_BYTES:
        raise ValueError(
            f"--seal: {file} holds {len(key)} bytes, a key has at least {FEWEST_KEY_BYTES}; make "
            "one with: openssl rand -hex 32"
        )
    return SealKey(key)
