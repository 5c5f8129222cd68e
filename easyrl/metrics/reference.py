"""The page of all metrics: ``python -m easyrl.metrics.reference > docs/metrics.md``."""

from __future__ import annotations

from easyrl.metrics.names import SECTIONS

HEAD = """# Metrics

Every number of a run's `metrics.jsonl`, made from `easyrl/metrics/names.py` by
`python -m easyrl.metrics.reference`. A line is one optimizer step, or the last one of a batch with
several updates; an evaluation has a line of its own under its step.

`metrics.names: trl` or `verl` shows those that TRL 1.16 and verl 0.9.1 have with the same meaning
by their names, in TensorBoard, in Weights & Biases and on the console. All others keep ours, and
`metrics.jsonl`, which other commands read, keeps ours for all. `<…>` is what a run puts there.
"""
COLUMNS = ("name", "unit", "meaning", "equation", "TRL", "verl", "remark")


def markdown() -> str:
    """``docs/metrics.md``."""
    lines = [HEAD]
    for section in SECTIONS:
        lines += [f"\n## {section.title}\n", "| " + " | ".join(COLUMNS) + " |"]
        lines.append("|" + "---|" * len(COLUMNS))
        for metric in section.metrics:
            names = (f"`{name}`" if name else "" for name in (metric.trl, metric.verl))
            cells = (
                *(f"`{metric.name}`", metric.unit, metric.meaning, metric.equation),
                *(*names, metric.remark),
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
