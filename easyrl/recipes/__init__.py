"""The policy-gradient objective: advantages of a group, loss sums of a micro-batch.

Pure functions of arrays and tensors: no engine, file or endpoint. A loss is a sum over trained
tokens, never a mean; one scalar per optimizer step divides it.
"""
