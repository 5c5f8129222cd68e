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
_TRAINING = (
    "| row | tokens/s, row | tokens/s, sequences | MFU | optimizer step, s | peak, GB | of it "
    "documented, GB |",
    "|---|---|---|---|---|---|---|",
)
_WEIGHTS = (
    "| row | GB | to pageable memory, GB/s | page-locked, GB/s | whole artefact, GB/s | |",
    "|---|---|---|---|---|---|",
)


def rendered(results: dict[str, Any]) -> str:
    """Markdown of the rows in ``results``, as ``benchmarks.gpu`` writes them."""
    rows = results["rows"]
    if not rows:
        return NOT_RUN
    of = {
        kind: [r for r in rows if r["name"].split()[0] == kind]
        for kind in ("training", "engine", "weights", "head")
    }
    machines = sorted({f"{r['device']}, torch {r['torch']}" for r in rows if "device" in r})
    parts = ["; ".join(machines) + "."] if machines else []
    if found := of["training"] + of["engine"]:
        parts.append("\n".join([*_TRAINING, *map(_training_line, found)]))
    if found := of["weights"]:
        parts.append("\n".join([*_WEIGHTS, *map(_weights_line, found)]))
    if found := of["head"]:
        chunks = next((list(r["head_ms"]) for r in found if "head_ms" in r), [])
        head = [f"| row | {' | '.join(f'chunk {c}, ms' for c in chunks)} |"]
        head.append("|---" * (1 + len(chunks)) + "|")
        parts.append("\n".join([*head, *(_head_line(r, chunks) for r in found)]))
    return "\n\n".join(parts)


def write_page(results: dict[str, Any], page: Path) -> None:
    """Puts the tables between the marks of ``page``. Raises ``ValueError`` if it has none."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{rendered(results)}\n{END}{after}", encoding="utf-8")


def _training_line(row: dict[str, Any]) -> str:
    if row["status"] != "done":
        return _unfinished(row, columns=6)
    values = (
        f"{row['row_tokens_per_s']:,.0f}",
        f"{row['sequence_tokens_per_s']:,.0f}",
        _number(row["mfu"], "{:.1%}"),
        _number(row["step_s"], "{:.3f}"),
        _number(row["peak_bytes"], "{:.1f}", 1e9),
        f"{row['documented_bytes'] / 1e9:.1f}",
    )
    return f"| {row['name']} | {' | '.join(values)} |"


def _weights_line(row: dict[str, Any]) -> str:
    if row["status"] != "done":
        return _unfinished(row, columns=5)
    values = (
        f"{row['bytes'] / 1e9:.2f}",
        f"{row['pageable_gb_per_s']:.1f}",
        f"{row['copy_gb_per_s']:.1f}",
        _number(row["artefact_gb_per_s"], "{:.1f}"),
        row["note"],
    )
    return f"| {row['name']} | {' | '.join(values)} |"


def _head_line(row: dict[str, Any], chunks: list[str]) -> str:
    if row["status"] != "done":
        return _unfinished(row, columns=max(1, len(chunks)))
    times = row["head_ms"]
    return f"| {row['name']} | {' | '.join(f'{times[chunk]:.1f}' for chunk in chunks)} |"


def _unfinished(row: dict[str, Any], columns: int) -> str:
    error = " ".join(row["error"].replace("|", "/").split())[:200]
    return f"| {row['name']} | {row['status']}: {error}{' |' * columns}"


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "–" if value is None else form.format(value / unit)


if __name__ == "__main__":
    write_page(json.loads(RESULTS.read_text(encoding="utf-8")), PAGE)
