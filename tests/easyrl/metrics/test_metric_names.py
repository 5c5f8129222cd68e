"""Every metric is declared with unit and meaning, and has a peer's name where it means the same."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from easyrl.metrics.alarms.rules import RULES
from easyrl.metrics.console import COLUMNS, RECORD_COLUMNS, ConsoleView, named_columns
from easyrl.metrics.names import METRICS, declared, name_for, renamed
from easyrl.metrics.reference import markdown
from easyrl.metrics.renamed import RenamedTracker

ROOT = Path(__file__).parents[3]
# what says, shows or reads metrics, and makes none
NO_WRITERS = (
    "easyrl/metrics/names.py",
    "easyrl/metrics/reference.py",
    "easyrl/commands/recipes.py",
)
PREFIXES = (
    "reward response policy tokens batch balance time throughput memory sync eval critic alarm"
).split()
# strings of that look which are no metrics: sums and names of tensors
NO_METRICS = {"time/phase_", "time/evaluation", "critic/", "critic/of_recipe/", "critic/num"} | {
    f"critic/{name}" for name in ("return", "return_square", "error", "error_square", "value")
}


def strings() -> Iterator[str]:
    """All text constants of the rooms that make metrics; of f-strings their parts."""
    for room in ("easyrl", "dataloaders", "inference_client", "kernels"):
        for file in sorted((ROOT / room).rglob("*.py")):
            if str(file.relative_to(ROOT)) not in NO_WRITERS:
                for node in ast.walk(ast.parse(file.read_text())):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield node.value


STRINGS = set(strings())


def test_the_document_is_up_to_date() -> None:
    command = "python -m easyrl.metrics.reference > docs/metrics.md"
    assert (ROOT / "docs/metrics.md").read_text() == markdown(), f"run {command}"


def test_each_has_a_meaning_and_none_is_there_twice() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names) > 90
    assert [metric.name for metric in METRICS if not metric.meaning] == []


def test_what_the_sources_call_a_metric_is_declared() -> None:
    pattern = re.compile(rf"({'|'.join(PREFIXES)})/[a-z0-9_]+")
    found = {text for text in STRINGS if pattern.fullmatch(text)} - NO_METRICS
    assert len(found) > 60
    assert [name for name in sorted(found) if _is_undeclared(name)] == []


def _is_undeclared(name: str) -> bool:
    """Families that take any name prove nothing of those that are written out."""
    metric = declared(name)
    return metric is None or "<metric>" in metric.name


def test_what_the_built_in_recipes_count_is_declared_by_name() -> None:
    texts = [file.read_text() for file in (ROOT / "easyrl/recipes").glob("*.py")]
    found = {name for text in texts for name in re.findall(r'"(\w+)_(?:sum|max)"', text)}
    found = {name for name in found if f"{name}_sum" in STRINGS or f"{name}_max" in STRINGS}
    counted = found - {"loss", "logprob_diff", "ratio", "entropy_coef"}
    assert {"kl", "importance_ratio", "teacher_kl", "wanted_margin"} <= counted
    assert [name for name in sorted(counted) if _is_undeclared(f"policy/{name}")] == []


@pytest.mark.parametrize("metric", [m.name for m in METRICS if not m.is_family])
def test_what_is_declared_is_in_the_sources(metric: str) -> None:
    """As it is, or as its last part where the first is put before it."""
    last = metric.rpartition("/")[2]
    forms = {metric, last, f"{last}_sum", f"{last}_max", last.removesuffix("_max") + "_max"}
    assert forms & STRINGS or f"{metric.partition('/')[0]}/" in STRINGS and last in STRINGS


def test_every_alarm_looks_at_metrics_that_are_declared() -> None:
    assert all(declared(f"alarm/{rule.name}") for rule in RULES)


@pytest.mark.parametrize("names", ["trl", "verl"])
def test_no_two_metrics_get_one_name(names: str) -> None:
    ours = [re.sub(r"<\w+>", "x", metric.name) for metric in METRICS]
    theirs = [name_for(name, names) for name in ours]  # type: ignore[arg-type]
    assert len(set(theirs)) == len(set(ours))
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) >= 15


@pytest.mark.parametrize(
    ("ours", "trl", "verl"),
    [
        ("reward/mean", "reward", "critic/score/mean"),
        ("reward/std", "reward_std", "reward/std"),
        ("reward/group_std", "reward/group_std", "reward/group_std"),
        ("reward/flat_groups", "frac_reward_zero_std", "reward/flat_groups"),
        ("reward/math/mean", "rewards/math/mean", "reward/math/mean"),
        ("reward/judge/short/std", "rewards/judge/short/std", "reward/judge/short/std"),
        ("response/mean_tokens", "completions/mean_length", "response_length/mean"),
        ("policy/clipped", "clip_ratio/region_mean", "actor/pg_clipfrac"),
        ("time/step_s", "step_time", "timing_s/step"),
        ("update1/loss", "update1/loss", "update1/loss"),
        ("never/heard/of", "never/heard/of", "never/heard/of"),
    ],
)
def test_names_of_the_peers(ours: str, trl: str, verl: str) -> None:
    assert (name_for(ours, "trl"), name_for(ours, "verl")) == (trl, verl)
    assert name_for(ours, "easyrl") == ours


def test_a_tracker_is_told_the_peers_names_and_the_rest_as_it_is() -> None:
    told: list[object] = []

    class Told:
        def log(self, step: int, metrics: dict[str, float]) -> None:
            told.append((step, metrics))

        def note(self, name: str, text: str) -> None:
            told.append((name, text))

        def close(self) -> None:
            told.append("closed")

    tracker = RenamedTracker(Told(), "trl")
    metrics = {"reward/mean": 1.0, "sync/bytes": 2.0}
    tracker.log(3, metrics)
    tracker.note("certificate", "abc")
    tracker.close()
    assert told == [(3, {"reward": 1.0, "sync/bytes": 2.0}), ("certificate", "abc"), "closed"]
    assert metrics == {"reward/mean": 1.0, "sync/bytes": 2.0}  # other trackers get the same object
    assert renamed(metrics, "easyrl") == metrics


ROW = {
    "reward/mean": 0.512,
    "eval/accuracy": 0.431,
    "throughput/tokens_per_s_per_device": 12_345.0,
    "time/step_s": 123.45,
    "time/wait_s": 12.34,
    "time/inference_idle_s": 1.5,
    "time/sync_s": 1.25,
    "response/mean_tokens": 1024.0,
    "grad_norm": 0.75,
    "loss": 0.5,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [COLUMNS, RECORD_COLUMNS])
@pytest.mark.parametrize("names", ["easyrl", "trl", "verl"])
def test_the_console_has_them_in_80_characters(monkeypatch, names, columns) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    view = ConsoleView(100, io.StringIO(), named_columns(columns, names))
    view._rows = [(20, ROW)]
    shown = io.StringIO()
    Console(file=shown, width=80).print(view._table())
    assert "…" not in shown.getvalue() and "20/100" in shown.getvalue()
    if names == "verl" and columns is COLUMNS:
        assert [line.split()[:3] for line in shown.getvalue().splitlines()[:3]] == [
            ["critic/", "timing_", "response_"],
            ["score/", "s/", "length/"],
            ["step", "mean", "eval"],
        ]


def test_plain_lines_have_the_peers_names_whole() -> None:
    stream = io.StringIO()
    ConsoleView(None, stream, named_columns(COLUMNS, "verl")).log(1, ROW)
    assert "critic/score/mean 0.512" in stream.getvalue()
    assert "timing_s/step 123.45" in stream.getvalue()
    ConsoleView(None, stream := io.StringIO(), named_columns(COLUMNS, "easyrl")).log(1, ROW)
    assert "  reward 0.512" in stream.getvalue() and "timing_s" not in stream.getvalue()
