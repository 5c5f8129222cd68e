"""The tables of the paper on periodic asynchrony, measured: on a cluster, or small on one machine.

A table (``tables.py``) is sides that a bench runs in turns: ``cluster_bench.py`` on a cluster,
``small_bench.py`` and ``scripted_bench.py`` here.
"""
