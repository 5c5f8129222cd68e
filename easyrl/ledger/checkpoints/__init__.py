"""Checkpoints that a run resumes from, whatever its number of ranks, and the exported model."""
