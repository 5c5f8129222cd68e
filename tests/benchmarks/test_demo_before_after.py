"""The demo before and after: shares pair by pair, and whose code runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.demo_before_after import AFTER, BEFORE, compared
from benchmarks.parts.worktree import imported_first


def said(seconds: float, accuracy: float) -> dict[str, float]:
    return {"seconds": seconds, "accuracy_before": 0.3, "accuracy_after": accuracy, "steps": 60}


def test_the_share_is_the_median_of_the_pairs() -> None:
    before = [said(100.0, 0.9), said(200.0, 0.8), said(300.0, 0.7)]
    after = [said(90.0, 0.95), said(100.0, 0.9), said(90.0, 0.85)]
    assert compared({BEFORE: before, AFTER: after}) == {
        "steps": 60,
        "before_s": 200.0,
        "after_s": 90.0,
        "of_before": 0.5,  # not that of the medians, 0.45
        "pairs": [0.9, 0.5, 0.3],
        "before_accuracy": 0.8,
        "after_accuracy": 0.9,
    }


def test_a_process_imports_its_checkout_s_code(tmp_path: Path) -> None:
    (tmp_path / "easyrl").mkdir()
    (tmp_path / "easyrl" / "__init__.py").write_text("")
    (tmp_path / "shown.py").write_text(SHOWN)
    for arguments in (["-c", SHOWN], ["-m", "shown"]):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=imported_first(tmp_path),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        assert Path(done.stdout.strip()).is_relative_to(tmp_path)


SHOWN = "import easyrl; print(easyrl.__file__)"
