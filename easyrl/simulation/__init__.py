"""``easyrl plan``: batches of a run simulated with other numbers of endpoints, ranks and prompts.

Consumes: rates, stated or calibrated on a run's timeline. Produces: the time of a step, tokens/s
per device and idle shares of each setting. Nothing of a run depends on it.
"""
