"""The report in Chromium: no console error, no request, batches switched, both themes."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from benchmarks.parts.browser import missing_browser, opened_page
from benchmarks.parts.long_run import write_long_run
from benchmarks.report import MOST_FIRST_PAINT_S, MOST_SWITCH_MS
from easyrl.report.collect import Verdict, collect
from easyrl.report.page import FILE, render
from tests.easyrl.report.test_report_data import (
    EVIL,
    calling,
    found,
    run_dir,  # noqa: F401
    with_an_episode,
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(missing_browser() is not None, reason=str(missing_browser())),
]


def test_a_report_opens_and_switches_batches(run_dir: Path) -> None:  # noqa: F811
    (run_dir / FILE).write_text(render(found(run_dir)))
    with opened_page(run_dir / FILE) as page:
        page.wait_for_batch()
        assert page.first_paint_s() > 0
        assert page.batch() == "29"
        page.switch("previous")
        assert page.batch() == "28"
        page.switch("next")
        assert page.batch() == "29"
        assert page.text_of("#verdict") == ["on-policy: 3 batches"]
        assert len(page.text_of("#timeline svg.main-svg")) > 0
        assert "train" in "".join(page.text_of("#timeline .legendtext"))
        assert "Reward" in "".join(page.text_of("[data-chart='0'] .gtitle"))
        tokens = page.text_of("#samples .token")
        assert tokens[1] == EVIL  # as text
        assert page.problems() == []


def test_a_run_of_ten_thousand_steps_is_seen_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_long_run(run, num_steps=10_000, num_batches=200, num_endpoints=8)
    (run / FILE).write_text(render(collect(run, lambda _: Verdict("unknown", ""), calling)))
    with opened_page(run / FILE) as page:
        assert page.first_paint_s() <= MOST_FIRST_PAINT_S
        page.wait_for_batch()
        assert median(page.switch("previous") for _ in range(5)) <= MOST_SWITCH_MS
        assert page.problems() == []


def test_an_episode_has_its_turns(run_dir: Path) -> None:  # noqa: F811
    with_an_episode(run_dir)
    report = collect(run_dir, lambda run: Verdict("sound", ""), calling)
    (run_dir / FILE).write_text(render(report))
    with opened_page(run_dir / FILE) as page:
        page.wait_for_batch()
        headings = page.text_of("#samples .turn > .faint")
        assert [heading.split(" |")[0] for heading in headings] == [
            *("turn 0", "turn 1, continues turn 0", "turn 2, a new beginning")
        ]
        assert page.text_of("#samples .written.tools") == ["t12"]
        assert page.text_of("#samples .turn.aside .sampled") == ["t15"]
        assert page.text_of("#samples .sampled")[1] == "t13"
        assert page.problems() == []


def test_the_theme_can_be_changed(run_dir: Path) -> None:  # noqa: F811
    (run_dir / FILE).write_text(render(found(run_dir)))
    theme = "return document.documentElement.dataset.theme"
    colour = "return getComputedStyle(document.body).backgroundColor"
    with opened_page(run_dir / FILE) as page:
        page.wait_for_batch()
        before = page.driver.execute_script(theme), page.driver.execute_script(colour)
        page.driver.find_element("id", "theme").click()
        after = page.driver.execute_script(theme), page.driver.execute_script(colour)
        assert {before[0], after[0]} == {"light", "dark"} and before[1] != after[1]
        assert page.problems() == []


def test_what_goes_wrong_in_a_page_is_found(run_dir: Path) -> None:  # noqa: F811
    broken = render(found(run_dir)).replace(
        "// ---- samples", "console.error('planted'); fetch('http://127.0.0.1:9/x').catch(() => 0);"
    )
    (run_dir / FILE).write_text(broken)
    with opened_page(run_dir / FILE) as page:
        page.wait_for_batch()
        assert any("planted" in problem for problem in page.problems())
