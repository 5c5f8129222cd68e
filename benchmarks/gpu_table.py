"""The tables of ``docs/benchmarks.md`` that come from ``docs/benchmarks-gpu.json``.

``python -m benchmarks.gpu_table`` writes them between the two marks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks-gpu.json"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- make bench-gpu: begin -->", "<!-- make bench-gpu: end -->"
NOT_RUN = "Not yet run: no GPU was at hand."
_COLUMNS = (
    "tokens/s, row",
    "tokens/s, sequences",
    "MFU",
    "optimizer step, s",
    "peak, GB",
    "of it documented, GB",
    "weight sync, GB/s",
    "to the host, GB/s",
    "to pageable memory, GB/s",
)
_ABSENT = "–"

Result = dict[str, Any]


def rendered(results: Result) -> str:
    """Markdown of the rows in ``results``, as ``benchmarks.gpu`` writes them: one table of models,
    one of chunk sizes."""
    rows = results["rows"]
    if not rows:
        return NOT_RUN
    machines = sorted({f"{r['device']}, torch {r['torch']}" for r in rows if "device" in r})
    parts = ["; ".join(machines) + "."] if machines else []
    heads = [r for r in rows if _kind(r) == "head"]
    if models := _model_lines([r for r in rows if r not in heads]):
        head = [f"| row | {' | '.join(_COLUMNS)} |", "|---" * (1 + len(_COLUMNS)) + "|"]
        parts.append("\n".join([*head, *models]))
    if heads:
        chunks = next((list(r["head_ms"]) for r in heads if "head_ms" in r), [])
        head = [f"| row | {' | '.join(f'chunk {c}, ms' for c in chunks)} |"]
        head.append("|---" * (1 + len(chunks)) + "|")
        parts.append("\n".join([*head, *(_head_line(r, chunks) for r in heads)]))
    return "\n\n".join(parts)


def _model_lines(rows: list[Result]) -> list[str]:
    """A model's weight sync stands in the first line of it that was measured."""
    weights = {_model(r): r for r in rows if _kind(r) == "weights" and r["status"] == "done"}
    lines = []
    for row in rows:
        if row["status"] != "done":
            lines.append(_unfinished(row, columns=len(_COLUMNS)))
        elif _kind(row) != "weights":
            cells = _training_cells(row) + _weights_cells(weights.pop(_model(row), None))
            lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    for row in weights.values():
        cells = [_ABSENT] * 6 + _weights_cells(row)
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return lines


def _training_cells(row: Result) -> list[str]:
    return [
        f"{row['row_tokens_per_s']:,.0f}",
        f"{row['sequence_tokens_per_s']:,.0f}",
        _number(row["mfu"], "{:.1%}"),
        _number(row["step_s"], "{:.3f}"),
        _number(row["peak_bytes"], "{:.1f}", 1e9),
        f"{row['documented_bytes'] / 1e9:.1f}",
    ]


def _weights_cells(row: Result | None) -> list[str]:
    if row is None:
        return [_ABSENT] * 3
    sync = _number(row["artefact_gb_per_s"], "{:.1f}")
    note = f" ({row['note']})" if row["note"] else ""
    return [sync + note, f"{row['copy_gb_per_s']:.1f}", f"{row['pageable_gb_per_s']:.1f}"]


def _kind(row: Result) -> str:
    return str(row["name"].split()[0])


def _model(row: Result) -> str:
    return str(row["name"].split()[1])


def write_page(results: dict[str, Any], page: Path) -> None:
    """Puts the tables between the marks of ``page``. Raises ``ValueError`` if it has none."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{rendered(results)}\n{END}{after}", encoding="utf-8")


def _head_line(row: dict[str, Any], chunks: list[str]) -> str:
    if row["status"] != "done":
        return _unfinished(row, columns=max(1, len(chunks)))
    times = row["head_ms"]
    return f"| {row['name']} | {' | '.join(f'{times[chunk]:.1f}' for chunk in chunks)} |"


def _unfinished(row: dict[str, Any], columns: int) -> str:
    error = " ".join(row["error"].replace("|", "/").split())[-200:]
    return f"| {row['name']} | {row['status']}: {error}{' |' * columns}"


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return _ABSENT if value is None else form.format(value / unit)


if __name__ == "__main__":
    write_page(json.loads(RESULTS.read_text(encoding="utf-8")), PAGE)
