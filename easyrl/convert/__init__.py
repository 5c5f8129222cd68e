"""Configurations of TRL and verl as EasyRL's: one table per peer, which docs/moving.md shows too.

Consumes: a peer's file. Produces: settings by our keys, and for each key that is set and has no
counterpart what to do instead.
"""
