"""All hostile behaviours, by name."""

from __future__ import annotations

import benchmarks.parts.hostile.bodies
import benchmarks.parts.hostile.contents
import benchmarks.parts.hostile.files
import benchmarks.parts.hostile.protocol
import benchmarks.parts.hostile.sockets
import benchmarks.parts.hostile.statuses
import benchmarks.parts.hostile.streams
import benchmarks.parts.hostile.weights  # noqa: F401
from benchmarks.parts.hostile.behaviour import CATALOGUE, Behaviour

BEHAVIOURS: dict[str, Behaviour] = CATALOGUE.behaviours
