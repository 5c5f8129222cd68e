"""The embedded inference server (``easyrl serve``): vLLM's routes over ``transformers``.

Consumes: requests for generations, and weight updates. Waits for: the next request or command,
while no sequence runs. Is unblocked by: either; both are seen between two decode steps. Produces:
token ids with log-probabilities, stamped with the version of the weights that made them.
"""
