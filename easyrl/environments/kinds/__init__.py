"""Kinds of environments, a file each, which a host process loads by its path.

Each has ``load(settings)``, called before there is an event loop, and gives an object with
``async start()``, awaited once, and ``async rollout(session, prompt)``: ``host.Session`` and
``host.Prompt`` in, a reward or an episode's mapping out (``host.result_of``).
"""
