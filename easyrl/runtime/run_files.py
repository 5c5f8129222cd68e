"""Names of the files of a run's folder."""

from __future__ import annotations

CERTIFICATE_FILE = "certificate.jsonl"
CONFIG_FILE = "config.yaml"  # of the newest life
LIFE_FILE = "life.json"
LOCK_FILE = "run.lock"
METRICS_FILE = "metrics.jsonl"


def life_config_file(life: int) -> str:
    """What life ``life`` was configured with."""
    return f"config-life{life}.yaml"
