"""Environments: what turns one sample into an episode of several requests, in processes of its own.

``hosts`` is the trainer's side: it starts host processes and runs rollouts in them. ``host`` is
what they run, by its path and with the standard library alone, so that an environment can have a
Python of its own; ``kinds`` has a file for each kind of environment. A host process imports this
package: it stays light.
"""
