"""Where metrics go: ``metrics.jsonl`` always, other back ends by name; one file for each.

Consumes: a dictionary of numbers per step, one per evaluation, and texts about the whole run.
Produces: a file in the run's folder, a table on a service, or an answer to whoever asks. Packages
of services are imported where their tracker is opened; what fails there later ends no run.
"""

# ruff: noqa: F401 (the names that other rooms import from here)
from __future__ import annotations

from easyrl.metrics.trackers.base import Tracker
from easyrl.metrics.trackers.jsonl import JsonlTracker, read_metrics
from easyrl.metrics.trackers.optional import OptionalTracker
