"""Builds the parts of a run from the configuration. The only place where the rooms meet.

Consumes: the validated configuration. Produces: connected parts, what fails cheaply first; each is
closed by the caller's ``ExitStack``, the last one first.
"""
