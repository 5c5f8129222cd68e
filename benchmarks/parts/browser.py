"""A report opened in headless Chromium, and what the browser says of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
_IS_QUIET = ("DEBUG", "INFO")


class NoBrowser(RuntimeError):
    """There is none on this machine; the message says how to get one."""


def missing_browser() -> str | None:
    """What is missing to open a page, and the remedy; None: nothing is."""
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        return "chromium and chromedriver are missing; apt install chromium chromium-driver"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed; pip install 'easyrl[dev]'"
    return None


@dataclass
class Page:
    """A report in the browser."""

    driver: Any

    def first_paint_s(self) -> float:
        """From the navigation's start to the first paint, by the browser."""
        script = "const p = performance.getEntriesByName('first-contentful-paint')[0];"
        return float(self._until(script + "return p ? p.startTime / 1000 : null"))

    def wait_for_batch(self) -> float:
        """Until a timeline is drawn; seconds since the navigation's start."""
        self._until("return document.documentElement.dataset.switchMs ?? null")
        return float(self.driver.execute_script("return performance.now() / 1000"))

    def batch(self) -> str:
        """Number of the batch that is drawn."""
        return str(self.driver.execute_script("return document.documentElement.dataset.batch"))

    def switch(self, button: str) -> float:
        """Presses a button of the timeline; milliseconds until the next frame after its drawing."""
        return float(
            self.driver.execute_async_script(
                "const [button, done] = arguments, root = document.documentElement;"
                "const before = root.dataset.batch, start = performance.now();"
                "document.getElementById(button).click();"
                "const look = () => root.dataset.batch === before ? requestAnimationFrame(look)"
                " : requestAnimationFrame(() => done(performance.now() - start)); look();",
                button,
            )
        )

    def samples_ms(self) -> float:
        """Goes to the samples; milliseconds until the next frame after their text is there."""
        return float(
            self.driver.execute_async_script(
                "const done = arguments[0], root = document.documentElement;"
                "const start = performance.now();"
                "document.getElementById('samples').scrollIntoView();"
                "const look = () => root.dataset.samplesMs ? "
                "requestAnimationFrame(() => done(performance.now() - start))"
                " : requestAnimationFrame(look); look();"
            )
        )

    def text_of(self, css: str) -> list[str]:
        """Of all elements that fit."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return list(self.driver.execute_script(script, css))

    def problems(self) -> list[str]:
        """What is on the console, and each request that is no part of the file."""
        said = [e["message"] for e in self.driver.get_log("browser") if e["level"] not in _IS_QUIET]
        script = "return performance.getEntriesByType('resource').map((e) => e.name)"
        asked = [
            url for url in self.driver.execute_script(script) if url[:5] not in ("blob:", "data:")
        ]
        return said + [f"asked for {url}" for url in asked]

    def _until(self, script: str) -> Any:
        end_s = time.monotonic() + LIMIT_S
        while (found := self.driver.execute_script(script)) is None:
            if time.monotonic() > end_s:
                raise TimeoutError(f"not after {LIMIT_S:.0f} s: {script}; {self.problems()}")
            time.sleep(0.02)
        return found


@contextmanager
def opened_page(path: Path, *, dark: bool = False, size: str = "1280,1500") -> Iterator[Page]:
    """``path`` in a new browser. Raises ``NoBrowser``."""
    if (problem := missing_browser()) is not None:
        raise NoBrowser(problem)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for each in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(each)
    options.add_argument(f"--window-size={size}")
    if dark:
        options.add_argument("--force-dark-mode")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.set_script_timeout(LIMIT_S)
        driver.get(path.resolve().as_uri())
        yield Page(driver)
    finally:
        driver.quit()
