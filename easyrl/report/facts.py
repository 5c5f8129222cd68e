"""What a report shows first: a name and a value each."""

from __future__ import annotations

from statistics import median

from easyrl.metrics.names import accuracies, accuracy_label
from easyrl.report.accounts import Shares
from easyrl.report.columns import MetricsFile
from easyrl.timeline.accounting import GENERATING, TAIL

# The paper's measure first: of the sequences, a prompt for each response; then as they are packed
_RATES = (
    ("tokens/s per device (TPSPD)", "throughput/tpspd"),
    ("packed tokens/s per device", "throughput/tokens_per_s_per_device"),
)
_WORK = (
    ("trainers train", "ranks", ("train", "look_ahead")),
    ("endpoints generate", "endpoints", (GENERATING, TAIL)),
)


def facts_of(metrics: MetricsFile, shares: Shares) -> list[tuple[str, str]]:
    """``shares``: of all batches; empty without a timeline."""
    facts = []
    if metrics.last_step is not None:
        facts.append(("steps", f"{metrics.last_step:,}"))
    shown = [
        (name, accuracy_label(name)) for name in accuracies([dict.fromkeys(metrics.columns, 0.0)])
    ]
    for name, label in (*shown, ("reward/mean", "reward")):
        if name in metrics.columns:
            values = metrics.columns[name].values
            facts.append((label, f"{values[0]:.3f} → {values[-1]:.3f}"))
    if "time/step_s" in metrics.columns:
        facts.append(("time in steps", _duration(sum(metrics.columns["time/step_s"].values))))
    for label, name in _RATES:
        if name in metrics.columns:
            facts.append((label, f"{median(metrics.columns[name].values):,.0f}"))
    for label, kind, causes in _WORK:
        if shares.get(kind):
            share = sum(shares[kind].get(cause, 0.0) for cause in causes)
            facts.append((label, f"{100 * share:.0f} % of the time"))
    return facts


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
