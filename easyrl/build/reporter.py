"""What is told of each step: comparison, alarms, throughput, trackers."""

from __future__ import annotations

from collections.abc import Callable

from easyrl.build.inference import Inference
from easyrl.build.run import OpenRun
from easyrl.build.timeline import Timeline
from easyrl.build.trackers import open_trackers
from easyrl.ledger.certificate.writer import Certificate
from easyrl.metrics.alarms.alarms import Alarms
from easyrl.metrics.logprob_mismatch import LogprobMismatch
from easyrl.metrics.reporter import StepReporter
from easyrl.metrics.step_progress import StepProgress
from easyrl.metrics.trackers import read_metrics
from easyrl.recipes.loading import load_recipe
from easyrl.runtime.run_files import METRICS_FILE
from easyrl.schema import Progress


def open_reporter(
    run: OpenRun,
    inference: Inference,
    certificate: Certificate | None,
    timeline: Timeline,
    *,
    progress: Progress,
    num_steps: int | None,
    look: Callable[[], StepProgress],
) -> StepReporter:
    """Figures go on after ``progress``; the trackers are told the ``certificate``'s hash last.

    ``look``: where the open step is, for the console.
    """
    trackers = open_trackers(run, certificate, progress, num_steps, look)
    mismatch: LogprobMismatch | None = None
    alarms: Alarms | None = None
    if run.ranks.is_first:
        mismatch = LogprobMismatch(run.config)
        settings = run.config.alarms
        recipe = load_recipe(run.config)
        if not recipe.compares_responses:  # equal rewards are no missing signal
            settings = settings.model_copy(update={"no_signal": None})
        alarms = Alarms(settings, run.record)
        alarms.add_earlier(read_metrics(run.output / METRICS_FILE))
    return StepReporter(
        lambda: run.ranks.world_size + inference.pool.num_devices,
        seconds={
            "time/inference_idle_s": inference.pool.idle_s,
            "time/reward_s": inference.rewards_busy.seconds,
            **timeline.seconds(),
        },
        known=lambda: {**timeline.metrics(), **inference.episode_metrics(run.collectives)},
        trackers=trackers,
        mismatch=mismatch,
        alarms=alarms,
    )
