"""Shared-prompt packing: groups become packed rows in which a shared beginning stands once.

Consumes: the groups that are ready, with their advantages. Waits for: nothing. Produces:
micro-batches within ``trainer.max_tokens_per_micro_batch`` tokens (one sequence that is longer has
a row of its own), as few and of as even cost as the order allows.
"""
