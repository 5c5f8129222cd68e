"""Processes for what must not run in the trainer: decoding, scoring, HTTP."""
