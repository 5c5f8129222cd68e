"""Judges each batch's metrics by the rules, and remembers which alarms are raised."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from easyrl.config import AlarmsConfig
from easyrl.metrics.alarms.history import History, Metrics, figure
from easyrl.metrics.alarms.rules import FIGURES, REWARD, RULES, Measured, Rule
from easyrl.metrics.event_log import Record

logger = logging.getLogger(__name__)

# An alarm ceases where its figure is a fifth inside its threshold, so that one which is just at it
# is told once.
CEASES_AT = 0.8


@dataclass(frozen=True)
class Alarm:
    """An alarm that was raised."""

    name: str
    step: int  # behind which
    text: str  # figures and remedy, one sentence each


class Alarms:
    """The alarms of a run, on the first rank.

    An alarm is raised once until its condition has ceased. What is raised follows from the metrics
    of all batches alone: after a resume they are added again, in silence.
    """

    def __init__(self, config: AlarmsConfig, record: Record) -> None:
        self._record = record
        self._window = config.window
        self._history = History(FIGURES, config.warmup_batches, config.window)
        thresholds = {rule: getattr(config, rule.name) for rule in RULES}
        self._thresholds: dict[Rule, float] = {
            rule: threshold for rule, threshold in thresholds.items() if threshold is not None
        }
        self._raised: set[str] = set()
        self._untaken: list[Alarm] = []

    @property
    def raised(self) -> frozenset[str]:
        """Names of the alarms whose conditions have not ceased."""
        return frozenset(self._raised)

    def add_earlier(self, batches: Iterable[Metrics]) -> None:
        """The metrics of what earlier attempts have trained, in order; what is no batch's is not
        looked at."""
        for metrics in batches:
            self._judge(metrics)

    def look(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Judges the next batch; its metrics ``alarm/NAME``, of alarms whose figures it has.

        Each alarm that is new goes to the log and the events.
        """
        if REWARD not in metrics:  # before the first batch
            return {}
        for rule, measured in self._judge(metrics):
            self._tell(rule, measured, step)
        return {
            f"alarm/{rule.name}": float(rule.name in self._raised)
            for rule in self._thresholds
            if figure(rule.figure, metrics) is not None
        }

    def take(self) -> list[Alarm]:
        """The alarms that were raised since this was last called."""
        taken, self._untaken = self._untaken, []
        return taken

    def _judge(self, metrics: Metrics) -> list[tuple[Rule, Measured]]:
        """What is raised behind the next batch and was not behind the one before."""
        if REWARD not in metrics:
            return []
        self._history.add(metrics)
        new = []
        for rule, threshold in self._thresholds.items():
            measured = rule.measure(self._history)
            if measured is None:
                continue
            if rule.name in self._raised:
                margin = CEASES_AT if rule.side == "above" else 1 / CEASES_AT
                if not rule.is_beyond(measured.value, threshold * margin):
                    self._raised.remove(rule.name)
            elif rule.is_beyond(measured.value, threshold):
                self._raised.add(rule.name)
                new.append((rule, measured))
        return new

    def _tell(self, rule: Rule, measured: Measured, step: int) -> None:
        threshold = self._thresholds[rule]
        figures = rule.says.format(**measured._asdict(), threshold=threshold)
        text = f"{figures}, in medians over {self._window} batches. What may help: {rule.remedy}"
        self._untaken.append(Alarm(rule.name, step, text))
        logger.warning("alarm %s behind step %d: %s", rule.name, step, text)
        self._record(
            "alarm",
            name=rule.name,
            step=step,
            value=measured.value,
            threshold=threshold,
            text=text,
        )
