"""EasyRL against TRL's ``GRPOTrainer``, whole optimizer steps on the same machine.

``workloads.py`` says what is trained, ``ours.py`` and ``trl_side.py`` train it, ``bound.py`` says
what no schedule could beat, ``rows.py`` keeps what was measured, ``report.py`` compares it.
"""
