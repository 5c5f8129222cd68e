"""Stages and dtypes whose state is saved and restored (bf16 needs ZeRO)."""

CASES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
