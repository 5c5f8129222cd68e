"""Seeds that depend on what is sampled, not on when or where."""

import hashlib


def sample_seed(run_seed: int, epoch: int, index: int, sample: int) -> int:
    """Seed of one response, in [0, 2**31): the same after a retry, a restart or a resume."""
    key = f"{run_seed}:{epoch}:{index}:{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 1
