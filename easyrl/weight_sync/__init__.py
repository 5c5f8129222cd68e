"""Once per batch: new weights to every endpoint, and proof of what each serves.

Consumes: the engine's weights after a batch is closed. Waits for: the push to the endpoints that
are up and their proof (version, checksums, log-probabilities); with none up, for one to return. Is
unblocked by: their answers, ``inference.max_outage_s``, or a stop. Produces: endpoints confirmed
for the new version, and the digest of the weights that they serve. An endpoint that returns in
mid-batch is brought to the served version without the trainer.
"""
