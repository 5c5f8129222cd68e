"""The error of a configuration that cannot be used."""

from __future__ import annotations


class ConfigError(ValueError):
    """The user's configuration cannot be used; the message names each key and the remedy."""
