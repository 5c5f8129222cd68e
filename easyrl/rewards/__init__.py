"""Rewards: one file per built-in function, a user's own file, and what runs them.

A reward function is called as ``f(prompt, texts, token_ids, **kwargs)`` and returns one number per
response: ``prompt`` is the ``schema.Prompt``, ``texts`` the decoded responses, ``token_ids`` their
tokens (int32 arrays). It may be ``async``. Worker processes import this package: it stays light.
"""
