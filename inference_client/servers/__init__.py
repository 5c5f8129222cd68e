"""Inference servers that the project brings or starts: the embedded one, and managed processes."""
