"""The ranks of adapters that vLLM can be started for (``--max-lora-rank``, vLLM 0.32)."""

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def least_max_rank(rank: int) -> int:
    """The smallest of them with room for ``rank``; else the largest."""
    return next((most for most in MAX_LORA_RANKS if most >= rank), MAX_LORA_RANKS[-1])
