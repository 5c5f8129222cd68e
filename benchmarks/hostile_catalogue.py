"""All hostile behaviours, by name."""

from __future__ import annotations

import benchmarks.hostile_bodies
import benchmarks.hostile_contents
import benchmarks.hostile_files
import benchmarks.hostile_protocol
import benchmarks.hostile_sockets
import benchmarks.hostile_statuses
import benchmarks.hostile_weights  # noqa: F401
from benchmarks.hostile_behaviour import CATALOGUE, Behaviour

BEHAVIOURS: dict[str, Behaviour] = CATALOGUE.behaviours
