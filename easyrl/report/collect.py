"""A run's folder as the plain data of a report: whatever is missing is left out and told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from easyrl.config import Config, ConfigError
from easyrl.config.file import load_config
from easyrl.metrics.names import declared
from easyrl.report.accounts import AccountsOfRun, Shares
from easyrl.report.columns import MetricsFile
from easyrl.report.curves import charts_of
from easyrl.report.facts import facts_of
from easyrl.report.newest_batches import MOST_BATCHES, NewestBatches
from easyrl.report.samples import Decode, NewestSamples
from easyrl.runtime.run_files import CONFIG_FILE, METRICS_FILE, file_of_run
from easyrl.samples.folder import SampleFolder
from easyrl.simulation.advice import advice_of_run
from easyrl.timeline.show import startup_line


@dataclass(frozen=True)
class Verdict:
    """What the certificate says."""

    state: str  # "sound", "broken", "unknown"
    told: str


@dataclass
class Collected:
    """All that a report shows."""

    name: str
    facts: list[tuple[str, str]]  # what is seen first: name and value
    verdict: Verdict
    config: str  # as YAML
    charts: list[dict[str, Any]]
    shares: Shares
    num_accounted: int  # batches that the shares are of
    batches: dict[str, str]  # number → ``packed_batch``
    samples: list[dict[str, Any]]
    advice: str = ""
    startup: str = ""
    notices: list[str] = field(default_factory=list)  # what is missing, and why


class Collector:
    """All that a run's folder has, now and again later: only what is new is read and packed then.

    ``decoder``: of the run's tokenizer; raises ``ConfigError`` where that is not there.
    """

    def __init__(
        self,
        run_dir: Path,
        verify: Callable[[Path], Verdict],
        decoder: Callable[[Config], Decode],
    ) -> None:
        self._run_dir, self._verify, self._decoder = run_dir, verify, decoder
        self._metrics = MetricsFile(run_dir / METRICS_FILE)
        self._accounts = AccountsOfRun(run_dir, MOST_BATCHES)
        self._batches = NewestBatches(run_dir)
        self._config = _ReadConfig()
        self._samples: NewestSamples | None = None  # None: there were none yet
        self._samples_problem = ""
        self._advised = _Advised()

    def collect(self) -> Collected:
        """Raises ``ValueError`` if it is no run's folder, ``OSError``."""
        self._read_config()
        self._metrics.read_on()
        self._accounts.read_on()
        self._batches.read_on(self._accounts.newest)
        shares, num_accounted = self._accounts.shares(), self._accounts.num_batches
        if not num_accounted:
            shares, num_accounted = self._batches.shares(), len(self._batches.packed)
        samples = self._shown_samples()
        self._advise()
        notices = {
            self._config.problem: self._config.problem,
            "no step was reported yet": self._metrics.last_step is None,
            "no samples are kept (samples.per_step)": self._samples is None,
            self._samples_problem: self._samples_problem,
            "no timeline is kept (timeline.keep)": self._batches.last is None,
        }
        config = self._config.config
        return Collected(
            name=self._run_dir.name if config is None else config.run.name,
            facts=facts_of(self._metrics, shares),
            verdict=self._verify(self._run_dir),
            config=self._config.text,
            charts=_charts(self._metrics),
            shares=shares,
            num_accounted=num_accounted,
            batches=self._batches.packed,
            samples=samples,
            advice=self._advised.advice,
            startup=self._advised.startup,
            notices=[told for told, is_so in notices.items() if is_so],
        )

    def _read_config(self) -> None:
        file = file_of_run(self._run_dir, CONFIG_FILE)
        text = file.read_text(errors="replace")
        if text == self._config.text:
            return
        try:
            self._config = _ReadConfig(text, load_config(file, to_look_back=True))
        except ConfigError as error:
            problem = f"the configuration cannot be read by this version: {error}"
            self._config = _ReadConfig(text, None, problem)
        self._samples, self._samples_problem = None, ""  # its tokenizer may be another

    def _shown_samples(self) -> list[dict[str, Any]]:
        if self._samples is None:
            if not SampleFolder(self._run_dir).steps():
                return []
            decode: Decode = lambda tokens: " ".join(map(str, tokens))  # noqa: E731
            try:
                if self._config.config is not None:
                    decode = self._decoder(self._config.config)
            except ConfigError as error:
                self._samples_problem = f"samples are shown as token ids: {error}"
            self._samples = NewestSamples(self._run_dir, decode)
        return self._samples.shown()

    def _advise(self) -> None:
        """Again when half of the batches that it was made from are others: it is simulated."""
        spans, last, config = self._batches.spans, self._batches.last, self._config.config
        if last is None:
            self._advised = _Advised()
            return
        before = self._advised.last
        if before is not None and 0 <= last - before < len(spans) // 2:
            return
        told = ""
        if config is None or config.source == "rollouts":  # records have no inference
            told = advice_of_run([each for of_ranks in spans for each in of_ranks], config)
        self._advised = _Advised(last, told, startup_line(spans) or "")


class _ReadConfig(NamedTuple):
    text: str = ""
    config: Config | None = None
    problem: str = ""  # why there is none


class _Advised(NamedTuple):
    last: int | None = None  # batch of those that it was made from
    advice: str = ""
    startup: str = ""


def _charts(metrics: MetricsFile) -> list[dict[str, Any]]:
    return [
        {
            "title": chart.title,
            "unit": unit,
            "curves": [
                {"name": c.name, "about": _about(c.name), "x": c.steps, "y": c.values}
                for c in curves
            ],
        }
        for chart, unit, curves in charts_of(metrics.columns)
    ]


def _about(name: str) -> str:
    known = declared(name)
    return "" if known is None else known.meaning
