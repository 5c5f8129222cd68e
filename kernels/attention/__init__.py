"""Shared-prompt attention over packed rows: one function, several backends.

A token attends to the ancestors of its segment and, causally, to its own segment. The dense-mask
reference runs everywhere; a faster backend is compared with it at first use.
"""
