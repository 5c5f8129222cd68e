"""Fetcher processes: requests for responses are sent and decoded outside the trainer's process.

Consumes: prompt token ids, sampling parameters and a seed, for one endpoint. Waits for: its answer.
Is unblocked by: the answer, an error, or the caller's cancelling, which aborts the request.
Produces: one response as arrays. Requests of a fetcher that dies or hangs are sent again.
"""
