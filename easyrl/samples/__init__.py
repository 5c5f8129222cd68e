"""What the model writes: a few prompts' groups of each step, kept in the run's folder and shown.

Consumes: groups as they are trained, with their advantages. Waits for: the batch to close. Is
unblocked by: its line in the certificate. Produces: a small compressed file per step and rank,
which ``easyrl samples`` shows, and which a run does not depend on.
"""
