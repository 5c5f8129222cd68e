"""The training loop: groups of a batch become accumulated gradients, then optimizer steps.

Consumes: finished groups in order of completion (strict mode: of the prompts). Waits for: the first
group that is ready; after the batch's last update, for the weight sync. Is unblocked by: a finished
group or response, a stop or an outage. Produces: optimizer steps, an account of each batch for the
certificate, metrics, a new policy version per batch. It knows neither HTTP nor files.
"""
