"""A run that was hit against the same run that was not: weights, metrics, and what was trained."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from safetensors import safe_open

from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.determinism import reproducible
from easyrl.runtime.run_folder import METRICS_FILE

SHOWN = 10


@dataclass(frozen=True)
class Comparison:
    """What differs between two runs; empty where nothing does."""

    weights: str  # hash of the disturbed run's final weights
    num_metrics: int  # that were compared, over all steps
    differences: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return not self.differences


def compare_runs(undisturbed: Path, disturbed: Path) -> Comparison:
    """Bit for bit: exported weights, and every metric of every step that is reproducible."""
    expected, weights = (weights_hash(run / "model") for run in (undisturbed, disturbed))
    differences = []
    if weights != expected:
        differences.append(f"final weights are {weights[:16]}, undisturbed {expected[:16]}")
    ours, theirs = (_by_step(read_metrics(run / METRICS_FILE)) for run in (disturbed, undisturbed))
    if (num_twice := _num_twice(disturbed / METRICS_FILE)) > 0:
        differences.append(f"{num_twice} steps are in the metrics twice")
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        differences.append(f"steps {odd[:SHOWN]} are in one of the metrics only")
    for step in sorted(ours.keys() & theirs.keys()):
        for name in sorted(ours[step].keys() | theirs[step].keys()):
            mine, other = ours[step].get(name), theirs[step].get(name)
            if mine != other and not (mine != mine and other != other):  # both NaN are equal
                differences.append(f"step {step}: {name} is {mine}, undisturbed {other}")
    return Comparison(weights, sum(map(len, ours.values())), tuple(differences))


def weights_hash(model: Path) -> str:
    """Over names, types, shapes and bytes of all tensors that ``model``'s safetensors hold."""
    hashed = blake3()
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model} holds no weights")
    found = {}
    for path in files:
        with safe_open(path, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                tensor = tensors.get_tensor(name)
                content = blake3(tensor.tobytes()).hexdigest()
                found[name] = f"{name} {tensor.dtype} {tensor.shape} {content}\n"
    for name in sorted(found):
        hashed.update(found[name].encode())
    return hashed.hexdigest()


def certificate_verdict(run_dir: Path) -> str:
    """What ``easyrl verify`` says: "on-policy", or its last line."""
    command = [sys.executable, "-m", "easyrl", "verify", str(run_dir)]
    result = subprocess.run(command, capture_output=True, text=True)
    said = (result.stdout + result.stderr).strip().splitlines() or ["nothing"]
    print(f"easyrl verify: {said[-1]}")
    if result.returncode == 0 and any(line.startswith("on-policy") for line in said):
        return "on-policy"
    return said[-1]


def _num_twice(file: Path) -> int:
    """Steps with a metric in more than one line; an evaluation's line has other ones."""
    names: dict[int, set[str]] = {}
    twice = set()
    for line in file.read_text().splitlines():
        metrics = json.loads(line)
        step = metrics.pop("step")
        known = names.setdefault(step, set())
        if known & metrics.keys():
            twice.add(step)
        known.update(metrics)
    return len(twice)


def _by_step(lines: list[dict[str, float]]) -> dict[int, dict[str, float]]:
    return {int(metrics["step"]): reproducible(metrics) for metrics in lines}
