"""A run's folder as the plain data of a report: whatever is missing is left out and told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.config.file import load_config
from easyrl.metrics.names import accuracies, accuracy_label, declared
from easyrl.metrics.trackers import read_metrics
from easyrl.report.batches import packed_batch
from easyrl.report.curves import charts_of, is_number
from easyrl.report.samples import Decode, shown_samples
from easyrl.runtime.run_files import CONFIG_FILE, METRICS_FILE, file_of_run
from easyrl.samples.folder import SampleFolder
from easyrl.simulation.advice import advice
from easyrl.timeline.accounting import LaneAccount, account, mean_shares
from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.show import startup_line
from easyrl.timeline.spans import BatchSpans, is_endpoint, is_rank

logger = logging.getLogger(__name__)

MOST_BATCHES = 200  # of the timeline, the newest


@dataclass(frozen=True)
class Verdict:
    """What the certificate says."""

    state: str  # "sound", "broken", "unknown"
    told: str


@dataclass
class Collected:
    """All that a report shows."""

    name: str
    facts: list[tuple[str, str]]  # what is seen first: name and value
    verdict: Verdict
    config: str  # as YAML
    charts: list[dict[str, Any]]
    shares: dict[str, dict[str, float]]  # "ranks" and "endpoints": cause → share of their time
    batches: dict[str, str]  # number → ``packed_batch``
    samples: list[dict[str, Any]]
    advice: str = ""
    startup: str = ""
    notices: list[str] = field(default_factory=list)  # what is missing, and why


def collect(
    run_dir: Path, verify: Callable[[Path], Verdict], decoder: Callable[[Config], Decode]
) -> Collected:
    """All that ``run_dir`` has.

    ``decoder``: of the run's tokenizer; raises ``ConfigError`` where that is not there. Raises
    ``ValueError`` if it is no run's folder.
    """
    file = file_of_run(run_dir, CONFIG_FILE)
    notices: list[str] = []
    config: Config | None = None
    try:
        config = load_config(file, to_look_back=True)
    except ConfigError as error:
        notices.append(f"the configuration cannot be read by this version: {error}")
    metrics = _metrics(run_dir, notices)
    collected = Collected(
        name=run_dir.name if config is None else config.run.name,
        facts=_facts(metrics),
        verdict=verify(run_dir),
        config=file.read_text(errors="replace"),
        charts=[
            {
                "title": chart.title,
                "unit": unit,
                "curves": [
                    {"name": c.name, "about": _about(c.name), "x": c.steps, "y": c.values}
                    for c in curves
                ],
            }
            for chart, unit, curves in charts_of(metrics)
        ],
        shares={},
        batches={},
        samples=_samples(run_dir, config, decoder, notices),
        notices=notices,
    )
    _add_timeline(collected, run_dir, config)
    return collected


def _metrics(run_dir: Path, notices: list[str]) -> list[dict[str, float]]:
    path = run_dir / METRICS_FILE
    metrics = read_metrics(path) if path.is_file() else []
    if not metrics:
        notices.append("no step was reported yet")
    return metrics


def _samples(
    run_dir: Path,
    config: Config | None,
    decoder: Callable[[Config], Decode],
    notices: list[str],
) -> list[dict[str, Any]]:
    folder = SampleFolder(run_dir)
    if not folder.steps():
        notices.append("no samples are kept (samples.per_step)")
        return []
    decode: Decode = lambda tokens: " ".join(map(str, tokens))  # noqa: E731
    try:
        if config is not None:
            decode = decoder(config)
    except ConfigError as error:
        notices.append(f"samples are shown as token ids: {error}")
    return shown_samples(folder, decode)


def _add_timeline(collected: Collected, run_dir: Path, config: Config | None) -> None:
    folder = TimelineFolder(run_dir)
    accounts: list[LaneAccount] = []
    kept: list[list[BatchSpans]] = []
    for number in folder.batches()[-MOST_BATCHES:]:
        if of_ranks := folder.read(number):
            kept.append(of_ranks)
            of_batch = account(of_ranks)
            accounts += of_batch
            collected.batches[str(number)] = packed_batch(of_ranks, of_batch)
    if not kept:
        collected.notices.append("no timeline is kept (timeline.keep)")
        return
    collected.shares = {
        "ranks": mean_shares(each for each in accounts if is_rank(each.lane)),
        "endpoints": mean_shares(each for each in accounts if is_endpoint(each.lane)),
    }
    synchronous = config is not None and config.run.mode == "sync"
    flat = [each for of_ranks in kept for each in of_ranks]
    per_rank = None if config is None else config.parallel.ranks_per_model
    collected.advice = advice(flat, synchronous=synchronous, devices_per_rank=per_rank)
    collected.startup = startup_line(kept) or ""


def _facts(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """What is seen first."""
    facts = []
    if metrics:
        facts.append(("steps", f"{int(metrics[-1]['step']):,}"))
    shown = [(name, accuracy_label(name)) for name in accuracies(metrics)]
    for name, label in (*shown, ("reward/mean", "reward")):
        values = [row[name] for row in metrics if is_number(row.get(name))]
        if values:
            facts.append((label, f"{values[0]:.3f} → {values[-1]:.3f}"))
    seconds = sum(row.get("time/step_s") or 0.0 for row in metrics)
    if seconds:
        facts.append(("time in steps", _duration(seconds)))
    name = "throughput/tokens_per_s_per_device"
    rates = sorted(row[name] for row in metrics if is_number(row.get(name)))
    if rates:
        facts.append(("tokens/s per device", f"{rates[len(rates) // 2]:,.0f}"))
    return facts


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _about(name: str) -> str:
    known = declared(name)
    return "" if known is None else known.meaning
