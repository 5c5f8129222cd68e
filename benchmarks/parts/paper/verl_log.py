"""Throughput of a verl run, from what it prints on the console.

A step is a line ``step:7 - key:value - …`` (behind whatever Ray puts before it). Of it are read
``perf/total_num_tokens``, tokens of all sequences with their prompts, ``perf/time_per_step``,
seconds, and ``perf/throughput``, tokens per second and device.
"""

from __future__ import annotations

import re
from pathlib import Path

STEP = re.compile(r"\bstep:(\d+) - (.*)")
VALUE = re.compile(
    r"([\w/@.-]+):(?:np\.\w+\()?([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\)?$"
)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
TOKENS, SECONDS, TPSPD = "perf/total_num_tokens", "perf/time_per_step", "perf/throughput"


def tokens_per_s_per_device(path: Path, devices: int | None) -> float:
    """Of all steps together. ``devices``: None takes what the log's own throughput implies.

    Raises ``ValueError`` naming the file, and the line where one is wrong.
    """
    tokens = device_seconds = 0.0
    for number, step in enumerate_steps(path):
        missing = [key for key in (TOKENS, SECONDS) if key not in step]
        if devices is None and TPSPD not in step:
            missing.append(TPSPD)
        if missing:
            raise ValueError(
                f"{path}:{number}: the step has no {' and no '.join(missing)}; give a log that has "
                "verl's perf/ metrics (trainer.logger with console)"
                + ("" if devices else ", or the number of devices with --baseline-devices")
            )
        if min(step[TOKENS], step[SECONDS], step.get(TPSPD, 1.0)) <= 0:
            raise ValueError(f"{path}:{number}: tokens, seconds and throughput have to be positive")
        tokens += step[TOKENS]
        device_seconds += step[SECONDS] * devices if devices else step[TOKENS] / step[TPSPD]
    if not tokens:
        raise ValueError(
            f"{path}: has no line with step:N and {TOKENS}; give the console log of a verl run"
        )
    return tokens / device_seconds


def enumerate_steps(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Line number and numbers of each step that was trained; the last line of a step counts.

    Lines without throughput, of a validation before the first step, are none.
    """
    steps: dict[int, tuple[int, dict[str, float]]] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        found = STEP.search(COLOUR.sub("", line))
        if found and "perf/" in found[2]:
            values = (VALUE.match(part.strip()) for part in found[2].split(" - "))
            step = {value[1]: float(value[2]) for value in values if value}
            steps[int(found[1])] = (number, step)
    return list(steps.values())
