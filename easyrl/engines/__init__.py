"""Training stacks behind one interface, ``TrainEngine``.

Consumes: micro-batches, a loss as a sum, and the denominator of each optimizer step. Waits for: the
other ranks in its collectives. Is unblocked by: their joining. Produces: accumulated gradients,
optimizer steps, the weights under the names of the model's files, and its state for checkpoints.
"""
