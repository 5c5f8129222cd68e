"""Checkpoints that a run resumes from, in any layout of ranks, and the exported model.

Consumes: the engine's state, progress and generators' states after a closed batch. Waits for: the
checkpoint before, and for the copy to host memory; with ``checkpoint.background`` not for the disk.
Is unblocked by: the write that has ended. Produces: ``checkpoints/step-N``, hashed, and ``model/``.
"""
