"""What is counted while a batch is trained, the metrics made of it, and where they go.

Consumes: sums and maxima of each update, merged over the ranks. Produces: one dictionary of numbers
per step for ``metrics.jsonl``, TensorBoard, Weights & Biases and the console; warnings when the
trainer's log-probabilities are not the inference server's; and the log of events from all threads.
"""
