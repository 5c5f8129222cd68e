"""The sub-commands of ``easyrl``, one per file: what its command line takes, and its work."""
