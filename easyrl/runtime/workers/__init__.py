"""Processes for what must not run in the trainer: decoding, scoring, HTTP.

Consumes: calls of functions, as pickles over a socket. Waits for: a free worker, then its answer.
Is unblocked by: the answer, the worker's death, or the call's time-out, which kills the worker.
Produces: results, or an error that names what happened.
"""
