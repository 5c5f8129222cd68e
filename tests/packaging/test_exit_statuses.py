"""README's table of exit statuses has every one that a command of ours sets, and no other."""

from __future__ import annotations

import re
import signal

from benchmarks.bad_input import AREAS
from easyrl.commands.replay import DIFFERENT, UNUSABLE
from easyrl.runtime.watchdog import STUCK
from easyrl.schema import NEEDS_CHANGE, TEMPORARY_FAILURE
from tests.packaging.doc_references import ROOT


def documented() -> set[int]:
    section = (ROOT / "README.md").read_text().partition("### Exit statuses\n")[2]
    cells = re.findall(r"^\| ([\d, ]+) \|", section.partition("\n###")[0], re.MULTILINE)
    return {int(status) for cell in cells for status in cell.split(",")}


def test_all_are_documented() -> None:
    signals = {128 + signal.SIGINT, 128 + signal.SIGTERM}
    own = {0, DIFFERENT, UNUSABLE, NEEDS_CHANGE, STUCK, TEMPORARY_FAILURE}
    assert documented() == own | signals


def test_the_benchmark_of_mistakes_asks_for_documented_ones() -> None:
    asked = {mistake.status for mistakes in AREAS.values() for mistake in mistakes}
    assert asked <= documented() - {0}
