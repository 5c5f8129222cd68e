"""The demo: an arithmetic task, a model that solves a part of it, and the run that improves it."""
