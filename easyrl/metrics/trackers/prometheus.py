"""Metrics at an HTTP address that Prometheus reads: the last step's, and where the open one is."""

from __future__ import annotations

import errno
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from easyrl.metrics.names import declared
from easyrl.metrics.step_progress import StepProgress
from easyrl.metrics.trackers.base import tracker_package

logger = logging.getLogger(__name__)

PREFIX = "easyrl_"


class PrometheusTracker:
    """Gauges at ``http://host:port/metrics``; needs the extra ``easyrl[prometheus]``.

    ``reward/mean`` is ``easyrl_reward_mean``, with ``run`` as its label. A metric that a step does
    not have keeps its last value; ``easyrl_step`` is the last step that was reported.

    Args:
        port: 0: any free one; the log has the address.
        look: where the open step is; asked whenever somebody reads.

    Raises ``OSError`` where it cannot listen, with key and remedy.
    """

    def __init__(
        self, run: str, host: str, port: int, look: Callable[[], StepProgress] | None
    ) -> None:
        package = tracker_package("prometheus", module="prometheus_client")
        self._family = tracker_package(
            "prometheus", module="prometheus_client.core"
        ).GaugeMetricFamily
        self._run, self._look = run, look
        self._metrics: dict[str, float] = {}
        self._notes: dict[str, str] = {}
        self._lock = threading.Lock()
        registry = package.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = package.start_http_server(port, host, registry)
        except OSError as error:
            raise OSError(error.errno, _cannot_listen(host, port, error)) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"
        # a warning, as all that a run says of itself: others are shown by nobody's settings
        logger.warning("prometheus: metrics are at %s", self.url)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        with self._lock:
            self._metrics |= metrics
            self._metrics["step"] = step

    def note(self, name: str, text: str) -> None:
        with self._lock:
            self._notes[name] = text

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def describe(self) -> list[Any]:
        """None before somebody reads: ``register`` would ask for all otherwise."""
        return []

    def collect(self) -> Iterator[Any]:
        """All gauges, as ``prometheus_client`` asks for them."""
        with self._lock:
            metrics, notes = dict(self._metrics), dict(self._notes)
        gauges = {}
        for name, value in metrics.items():
            metric = declared(name)
            meaning = name if metric is None else f"{name} ({metric.unit}): {metric.meaning}"
            gauges[gauge_name(name)] = meaning, value
        if self._look is not None:
            gauges |= _of_open_step(self._look())
        for name, (meaning, value) in gauges.items():
            gauge = self._family(name, meaning, labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge
        if self._look is not None:
            gauge = self._family(
                f"{PREFIX}open_step_does", "what the trainer does now", labels=["run", "does"]
            )
            gauge.add_metric([self._run, self._look().does], 1.0)
            yield gauge
        for name, text in notes.items():
            gauge = self._family(f"{gauge_name(name)}_info", name, labels=["run", "text"])
            gauge.add_metric([self._run, text], 1.0)
            yield gauge


def gauge_name(name: str) -> str:
    """As Prometheus writes names: letters, digits and ``_``."""
    return PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", name)


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"metrics.prometheus_port: {port} is in use at {host}, maybe by another run; set a "
            "free one, or 0 for any, which the log then says"
        )
    return (
        f"metrics.prometheus_host, metrics.prometheus_port: {host}:{port} cannot be listened at "
        f"({error.strerror}); name an address of this machine, and a port above 1023"
    )


def _of_open_step(progress: StepProgress) -> dict[str, tuple[str, float]]:
    """Meaning and value by name; what there is none of now is left out."""
    answered, asked = progress.evaluated or (None, None)
    gauges: dict[str, tuple[str, float | None]] = {
        "open_step": ("the step whose metrics come next", progress.step),
        "open_step_size": (f"{progress.unit} of the open batch", progress.size),
        "open_step_arrived": (f"of these {progress.unit}, finished and accepted", progress.arrived),
        "open_step_trained": ("of these, trained by the first rank", progress.trained),
        "open_step_in_flight": ("requests at the endpoints", progress.in_flight),
        "open_step_scoring": ("calls of rewards that run or wait", progress.scoring),
        "open_step_evaluated": ("held-out prompts that are scored", answered),
        "open_step_evaluation_size": ("held-out prompts of the evaluation", asked),
        "writes_checkpoint": ("a checkpoint is being written", float(progress.writes_checkpoint)),
        "endpoints_down": ("endpoints that are down", len(progress.endpoints_down)),
    }
    return {
        PREFIX + name: (meaning, float(value))
        for name, (meaning, value) in gauges.items()
        if value is not None
    }
