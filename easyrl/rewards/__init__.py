"""Rewards: one file per built-in function, a user's own file, and what runs them.

A built-in reward function is called as ``f(prompt, texts, token_ids, **kwargs)`` and returns one
number per response: ``prompt`` is the ``schema.Prompt``, ``texts`` the decoded responses,
``token_ids`` their tokens (int32 arrays). A user's may have another signature (``signatures.py``),
be ``async``, and say more or less than a number (``functions.validated``). A built-in one has its
``kwargs`` as keyword-only arguments, whose annotations are checked at the start, and beside it,
where it needs something of a prompt, ``check_prompt(prompt, **kwargs)``. Without responses it does
nothing. Worker processes import this package: it stays light.
"""
