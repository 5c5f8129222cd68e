"""Environments and clients that do what they should not, for ``benchmarks.hostile``."""
