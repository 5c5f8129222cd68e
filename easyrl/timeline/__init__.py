"""What ran when: spans of the trainer's thread, the producer and each endpoint, and their sums.

Consumes: spans, from any thread. Waits for: nothing; files are written beside the run's work. Is
unblocked by: the first phase of the next batch. Produces: a small compressed file per batch and
rank, of which ``trace.json`` is made, and the share of each cause in a batch's time.
"""
