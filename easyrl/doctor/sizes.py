"""Bytes as people write them."""

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(num_bytes: float) -> str:
    """In powers of 1000: ``1.2 GB``."""
    for factor, unit in UNITS:
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"
