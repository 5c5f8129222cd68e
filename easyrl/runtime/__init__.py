"""The process around a run: ranks, signals, watchdog, determinism, locks, files, worker processes.

Consumes: signals, the launcher's and other ranks' ends, tokens counted. Waits for: all ranks, where
they agree on something. Is unblocked by: the last rank's answer. Produces: a stop that every rank
hears of and that ends in time, the end of a run that stands still, and values exchanged as JSON.
"""
