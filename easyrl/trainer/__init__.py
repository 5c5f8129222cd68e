"""The training loop: groups of a batch become accumulated gradients, then optimizer steps.

Consumes: finished groups in order of completion (strict mode: in that of
the prompts). Waits for: the first group that is ready; after the batch's last update, for the
weight sync. Is unblocked by: a finished group, a finished response while frozen models can run
ahead of it, a stop or an outage. Produces: optimizer steps, an account of each batch for the
certificate, metrics, and a new policy version per batch.

It is given everything it needs (engine, producer, weight sync, certificate) and knows neither HTTP
nor files. Evaluation on held-out prompts runs here, too, between two batches.
"""
