"""Weight sync: new weights to every endpoint once per batch, and proof of what each serves.

Consumes: the engine's weights after a batch is closed. Waits for: the push to the endpoints that
are up and their proof (version, checksums, log-probabilities); with none up, for one to return. Is
unblocked by: their answers, ``inference.max_outage_s``, or a stop. Produces: endpoints confirmed
for the new version, and the digest of the weights that they serve (docs/endpoints.md). An
endpoint that returns in mid-batch is brought to the served version without the trainer. The canary
of one that is known runs beside the next batch's first requests, whose responses wait for it.

Read ``publish.py`` (all ranks, once per batch) → ``delivery.py`` (the weights are written, and the
trainer is asked about samples) → ``fan_out.py`` (many endpoints at once) → ``reconcile.py`` (an
endpoint is brought to the target) → ``push.py``, ``proof.py`` → ``confirm.py`` (who serves the
target, also in mid-batch). Of a policy with adapters ``adapter.py`` decides first what travels.
"""
