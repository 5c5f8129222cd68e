"""A split model behind ``TrainEngine``: the trainer runs on the head of each model-parallel group
alone, the group's other processes follow its calls (docs/parallelism.md).

Consumes the calls of the trainer on the head; waits for the head on the others. Produces what the
engine's methods return, fetched from the process that has it.
"""
