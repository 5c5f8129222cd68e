"""Names of the files of a run's folder."""

from __future__ import annotations

from pathlib import Path

CERTIFICATE_FILE = "certificate.jsonl"
CONFIG_FILE = "config.yaml"  # of the newest attempt
ATTEMPT_FILE = "attempt.json"
LOCK_FILE = "run.lock"
METRICS_FILE = "metrics.jsonl"


def attempt_config_file(attempt: int) -> str:
    """What attempt ``attempt`` was configured with."""
    return f"config-attempt{attempt}.yaml"


def file_of_run(folder: Path, name: str) -> Path:
    """A file that every run has. Raises ``ValueError`` if ``folder`` is no run's."""
    file = folder / name
    if not file.is_file():
        raise ValueError(f"{folder}: has no {name}; name the run.output_dir of a run")
    return file
