"""Step metrics: completed with throughput, then handed to the trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from easyrl.metrics.alarms.alarms import Alarms
from easyrl.metrics.batch_metrics import BatchTotals
from easyrl.metrics.logprob_mismatch import LogprobMismatch
from easyrl.metrics.trackers import Tracker


@dataclass
class StepReporter:
    """Completes each step's metrics and hands them to the trackers. All ranks call every method.

    Throughput is of the tokens that went through the trainer, each prompt once per group, and, as
    ``throughput/tpspd``, of the sequences, each with its prompt (paper §6).
    """

    num_devices: Callable[[], int]  # the trainer's and the inference endpoints' together, now
    # Seconds so far of what goes on beside the trainer's thread, by the metric that has those from
    # one report to the next.
    seconds: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    known: Callable[[], Mapping[str, float]] = dict  # what else is known at a report, on all ranks
    trackers: Sequence[Tracker] = ()  # on the first rank
    mismatch: LogprobMismatch | None = None  # on the first rank
    alarms: Alarms | None = None  # on the first rank

    def __post_init__(self) -> None:
        self._before_s = {name: so_far() for name, so_far in self.seconds.items()}

    def compare(self, totals: BatchTotals) -> None:
        """Warns of a likely cause where trainer and server disagree on log-probabilities."""
        if self.mismatch is not None:
            self.mismatch.look(totals.metrics.compared)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """``metrics`` are of the step, and of the sync behind it."""
        for name, so_far in self.seconds.items():
            now_s = so_far()
            metrics[name] = now_s - self._before_s[name]
            self._before_s[name] = now_s
        metrics |= self.known()
        if "tokens/packed" in metrics:
            step_s, num_devices = metrics["time/step_s"], self.num_devices()
            tokens_per_s = metrics["tokens/packed"] / step_s
            metrics["throughput/devices"] = float(num_devices)
            metrics["throughput/tokens_per_s"] = tokens_per_s
            metrics["throughput/tokens_per_s_per_device"] = tokens_per_s / num_devices
            metrics["throughput/tpspd"] = metrics["tokens/sequences"] / step_s / num_devices
        if self.alarms is not None:
            metrics |= self.alarms.look(step, metrics)
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def report_evaluation(self, step: int, figures: dict[str, float]) -> None:
        """Of the weights behind ``step``, which was reported before."""
        for tracker in self.trackers:
            tracker.log(step, figures)
