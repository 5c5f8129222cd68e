"""Builds the parts of a run from the configuration. The only place where the rooms meet."""
