"""The report in Chromium: no console error, no request, batches switched, both themes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from benchmarks.parts.browser import Page, missing_browser, opened_page
from benchmarks.parts.long_run import metrics_line, write_batch, write_long_run
from benchmarks.report import MOST_FIRST_PAINT_S, MOST_SWITCH_MS, heaviest
from easyrl.report.collect import Collector, Verdict
from easyrl.report.page import FILE, render
from easyrl.report.written_mark import WrittenMark
from easyrl.samples.folder import SampleFolder
from easyrl.timeline.folder import TimelineFolder
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


STATE = """
    const root = document.documentElement;
    return {batch: root.dataset.batch, theme: root.dataset.theme,
      step: byId("sample-step").value, colour: byId("colour").value,
      open: byId("config").open,
      closed: byId("lanes").open, scroll: Math.round(scrollY)};
"""


def tokens_of(page: Page) -> list[str]:
    """Of the samples that are seen, once they have their colours."""
    return until(lambda: page.text_of("#samples .token"))


def until(look: Callable[[], object], limit_s: float = 20.0):
    """What ``look`` finds."""
    end_s = time.monotonic() + limit_s
    while not (seen := look()):
        assert time.monotonic() < end_s, "not seen"
        time.sleep(0.05)
    return seen


def click(page: Page, css: str) -> None:
    page.driver.execute_script("document.querySelector(arguments[0]).click()", css)


def choose(page: Page, name: str, value: str) -> None:
    script = (
        "const made = byId(arguments[0]); made.value = arguments[1];"
        "made.dispatchEvent(new Event('change'))"
    )
    page.driver.execute_script(script, name, value)


class WatchedRun:
    """A run that goes on while its page is open, which looks for that five times a second."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.path = folder, folder / FILE
        self._collector = Collector(folder, lambda _: Verdict("unknown", ""), calling)
        self._mark, self._number = WrittenMark(self.path), 0

    def write(self) -> None:
        self._number += 1
        watched = self._mark.next(0.2)._replace(number=self._number)
        self.path.write_text(render(self._collector.collect(), watched))
        self._mark.set(watched.number)

    def go_on(self, batch: int) -> None:
        """By a batch."""
        write_batch(self.run_dir, batch, TimelineFolder(self.run_dir).read(28))
        with (self.run_dir / "metrics.jsonl").open("ab") as file:
            file.write(metrics_line(batch + 1, random.Random(batch)))
        groups = SampleFolder(self.run_dir).read(30)
        own = [msgspec.structs.replace(group, step=batch + 1) for group in groups]
        SampleFolder(self.run_dir).write(batch + 1, 0, 1, own)
        self.write()

    def end(self) -> None:
        self.path.write_text(render(self._collector.collect()))
        self._mark.remove()


def loads(page: Page) -> int:
    """How often the page was loaded in this tab."""
    script = (
        "const times = JSON.parse(sessionStorage.getItem('loads') ?? '[]');"
        "if (times.at(-1) !== performance.timeOrigin) times.push(performance.timeOrigin);"
        "sessionStorage.setItem('loads', JSON.stringify(times)); return times.length"
    )
    return int(page.driver.execute_script(script))


def test_a_watched_page_follows_its_run_to_the_newest_batch(run_dir: Path) -> None:  # noqa: F811
    run = WatchedRun(run_dir)
    run.write()
    with opened_page(run.path) as page:
        page.wait_for_batch()
        assert page.batch() == "29" and loads(page) == 1
        time.sleep(1.0)
        assert loads(page) == 1  # nothing was written
        run.go_on(30)
        until(lambda: page.batch() == "30")
        assert "31" in page.text_of(".facts b")
        page.switch("previous")  # to one that stays there, as it was chosen
        assert page.batch() == "29"
        run.go_on(31)
        until(lambda: "32" in page.text_of(".facts b"))
        page.wait_for_batch()
        assert page.batch() == "29"
        page.switch("next")
        page.switch("next")  # the newest: what is newest later, then
        assert page.batch() == "31"
        run.go_on(32)
        until(lambda: page.batch() == "32")
        run.end()
        until(lambda: not page.text_of("#follow") and page.driver.find_elements("id", "theme"))
        until(
            lambda: page.driver.execute_script(
                "return typeof byId === 'function' && !byId('follow')"
            )
        )
        page.wait_for_batch()
        before = loads(page)
        time.sleep(1.0)
        assert loads(page) == before  # what is ended is not looked for
        assert all("written.svg" in each for each in page.problems())  # which is gone


def test_what_a_person_has_chosen_stays_over_reloads(run_dir: Path) -> None:  # noqa: F811
    run = WatchedRun(run_dir)
    run.write()
    run.go_on(30)
    with opened_page(run.path, size="1280,600") as page:
        page.wait_for_batch()
        theme = page.driver.execute_script("return document.documentElement.dataset.theme")
        click(page, "#theme")
        click(page, "#config summary")
        choose(page, "sample-step", "30")
        choose(page, "colour", "logprobs")
        page.samples_ms()
        tokens_of(page)
        page.driver.execute_script("scrollTo(0, document.querySelector('#samples > *').offsetTop)")
        told = "return document.querySelector('#samples > *').getBoundingClientRect().top"
        place = page.driver.execute_script(told)
        run.go_on(31)
        until(lambda: "32" in page.text_of(".facts b"))
        page.wait_for_batch()
        tokens_of(page)
        state = page.driver.execute_script(STATE)
        assert state["theme"] != theme and state["open"] and not state["closed"]
        assert (state["step"], state["colour"], state["batch"]) == ("30", "logprobs", "31")
        until(lambda: abs(page.driver.execute_script(told) - place) < 3)
        choose(page, "sample-step", "32")  # the newest
        run.go_on(32)
        until(lambda: "33" in page.text_of(".facts b"))
        assert page.driver.execute_script(STATE)["step"] == "33"
        assert all("written.svg" in each for each in page.problems())


def test_a_page_that_nobody_follows_stays(run_dir: Path) -> None:  # noqa: F811
    run = WatchedRun(run_dir)
    run.write()
    with opened_page(run.path) as page:
        page.wait_for_batch()
        click(page, "#follow")
        run.go_on(30)
        time.sleep(1.0)
        assert page.batch() == "29" and loads(page) == 1
        page.driver.refresh()
        page.wait_for_batch()
        assert page.batch() == "30" and not page.driver.find_element("id", "follow").is_selected()


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
        assert {"train", "push", "endpoint http://host1:8000"} <= set(
            page.text_of("#legend button")
        )
        assert "Reward" in "".join(page.text_of("[data-chart='0'] .gtitle"))
        page.samples_ms()
        assert tokens_of(page)[1] == EVIL  # as text
        assert page.problems() == []


def test_a_run_of_ten_thousand_steps_is_seen_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_long_run(run, heaviest(10_000, num_batches=12))
    (run / FILE).write_text(
        render(Collector(run, lambda _: Verdict("unknown", ""), calling).collect())
    )
    coloured = "return document.querySelectorAll('#samples .token').length"
    with opened_page(run / FILE) as page:
        assert page.first_paint_s() <= MOST_FIRST_PAINT_S
        page.wait_for_batch()
        assert page.text_of("#samples") == [""]  # nobody looks at them
        assert max(page.switch("previous") for _ in range(5)) <= MOST_SWITCH_MS
        page.samples_ms()
        tokens_of(page)
        assert 0 < page.driver.execute_script(coloured) < 40_000  # of 200,000
        assert max(page.switch("next") for _ in range(5)) <= MOST_SWITCH_MS
        assert page.problems() == []


def test_what_a_span_is_stands_beside_the_mouse(run_dir: Path) -> None:  # noqa: F811
    (run_dir / FILE).write_text(render(found(run_dir)))
    over = """
        const plot = byId("timeline"), box = plot.getBoundingClientRect(), axes = plot._fullLayout;
        const [name, start, seconds] = shown.ranks[0].spans.find((span) => span[2] > 0.1);
        plot.dispatchEvent(new MouseEvent("mousemove", {
          clientX: box.left + axes.xaxis._offset + axes.xaxis.d2p(start + seconds / 2),
          clientY: box.top + axes.yaxis._offset + axes.yaxis.d2p(0) }));
        const told = byId("span-told");
        return [told.hidden, told.textContent, name + ": " + seconds.toFixed(4)];
    """
    with opened_page(run_dir / FILE) as page:
        page.wait_for_batch()
        is_hidden, told, wanted = page.driver.execute_script(over)
        assert not is_hidden and told.startswith(wanted)
        click(page, "#legend button")  # the first name is no longer drawn
        assert page.driver.execute_script("return hidden.size") == 1
        assert page.problems() == []


def test_an_episode_has_its_turns(run_dir: Path) -> None:  # noqa: F811
    with_an_episode(run_dir)
    report = Collector(run_dir, lambda run: Verdict("sound", ""), calling).collect()
    (run_dir / FILE).write_text(render(report))
    with opened_page(run_dir / FILE) as page:
        page.samples_ms()
        tokens_of(page)
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
    planted = "console.error('planted'); fetch('http://127.0.0.1:9/x').catch(() => 0);\n"
    place = "\n// ---- samples"
    whole = render(found(run_dir))
    assert whole.count(place) == 1
    broken = whole.replace(place, f"\n{planted}{place}")
    (run_dir / FILE).write_text(broken)
    with opened_page(run_dir / FILE) as page:
        page.wait_for_batch()
        assert any("planted" in problem for problem in page.problems())
