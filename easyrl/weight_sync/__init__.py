"""Weight sync: new weights to every endpoint once per batch, and proof of what each serves.

Consumes: the engine's weights. Waits for: endpoints, and what they show. Is unblocked by: their
answers. Produces: endpoints confirmed for a version (DESIGN §2.1, §2.5, §9).

Read ``publish.py`` (all ranks, once per batch) → ``reconcile.py`` (one endpoint is brought to the
target) → ``push.py``, ``proof.py`` → ``confirm.py`` (who serves the target, also in mid-batch).
"""
