"""A second hash of each tensor, keyed, formed in a thread while its writer copies and hashes it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from blake3 import blake3

from easyrl.inference_client.vllm_plugin.easyrl_vllm.mapping import Bytes

FEWEST_BYTES = 2**18  # below, handing it to the thread takes longer


class KeyedHasher:
    """blake3 of whole tensors keyed with ``nonce``, 32 bytes; ``digests`` by name, in hex.

    A pass of the writer has two hashes to form; hashing lets other threads run.
    """

    def __init__(self, nonce: bytes) -> None:
        self.digests: dict[str, str] = {}
        self._nonce = nonce
        self._thread = ThreadPoolExecutor(1, "easyrl-keyed-hash")

    @contextmanager
    def beside(self, name: str, data: Bytes) -> Iterator[None]:
        """Hashes ``data`` while the body runs; at its end it is done with them."""
        hashing = self._thread.submit(self._hash, data) if len(data) >= FEWEST_BYTES else None
        try:
            yield
        finally:
            self.digests[name] = self._hash(data) if hashing is None else hashing.result()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def _hash(self, data: Bytes) -> str:
        return blake3(data.data, key=self._nonce).hexdigest()
