"""Finished groups on disk as they arrive, so that a killed run loses none and repeats none.

A batch *v* is a folder ``journal/batch-<v>``. Each attempt of each rank writes its own file there:
the version and the hash of the weights that its groups are made by, then a record per group, and
one for all that the trainer took together. A later attempt trains what earlier ones finished *for
the same weights*, in the order in which they did, and asks for the rest.
"""
