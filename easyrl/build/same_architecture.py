"""Whether the endpoints of a run that begins serve a model of the policy's architecture."""

from __future__ import annotations

import asyncio
import logging

from easyrl.build.inference import Inference
from easyrl.config import Config, ConfigError
from easyrl.doctor.architecture import architecture_finding, weight_shapes

logger = logging.getLogger(__name__)

MOST_S = 10.0  # for all answers; who takes longer is not judged here


def require_same_architecture(config: Config, inference: Inference) -> None:
    """Raises ``ConfigError`` where none of the endpoints that are up could be given our weights.

    One among others is warned of, and excluded by the weight sync. Those that do not tell are not
    judged.
    """
    shapes = weight_shapes(config.model)
    clients = [e.client for e in inference.pool.endpoints if e.is_up]

    async def compare() -> list[str]:
        tasks = [
            asyncio.create_task(architecture_finding(each, config.model, shapes))
            for each in clients
        ]
        done, late = await asyncio.wait(tasks, timeout=MOST_S)
        for task in late:
            task.cancel()
        found = [task.result() for task in tasks if task in done]
        return [
            f"{f.name.rpartition(' ')[2]}: {f.seen}; {f.remedy}"
            for f in found
            if f.verdict == "failed"
        ]

    problems = inference.thread.run(compare()) if clients else []
    if problems and len(problems) == len(clients):
        raise ConfigError("inference.endpoints: " + "\n  ".join(problems))
    for problem in problems:
        logger.warning("inference.endpoints: %s", problem)
