"""Names of the files of a run's folder."""

from __future__ import annotations

CERTIFICATE_FILE = "certificate.jsonl"
CONFIG_FILE = "config.yaml"  # of the newest attempt
ATTEMPT_FILE = "attempt.json"
LOCK_FILE = "run.lock"
METRICS_FILE = "metrics.jsonl"


def attempt_config_file(attempt: int) -> str:
    """What attempt ``attempt`` was configured with."""
    return f"config-attempt{attempt}.yaml"
