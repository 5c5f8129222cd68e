"""What a run is held to: journal, certificate and checkpoints, and what is read back from them.

Consumes: finished groups as they arrive, each batch's account, the engine's state. Waits for: the
disk, as far as ``journal.fsync`` asks. Is unblocked by: the write. Produces: files from which a run
resumes in mid-batch, is verified, and has a step trained again without inference.

A batch counts once its line is in the certificate, and its groups' records are written before it.
"""
