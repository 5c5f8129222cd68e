"""The parts of ``easyrl lab``: replays of one batch, each with a gradient that is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from easyrl.build.replay import replay_batch
from easyrl.config import Config
from easyrl.engines.base import StepResult
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.lab.variants import Comparison, Measured, compare
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.ledger.recorded_run import RecordedRun
from easyrl.ledger.traces import CHECKPOINT_FOLDER
from easyrl.trainer.loop import Trainer

Settings = Sequence[str]  # key.path=value
Load = Callable[[Settings], Config]  # the attempt's configuration with these in place of its own


class KeptGradient(DeepSpeedEngine):
    """An engine that keeps the gradient of its first step, divided by the denominator.

    Host memory: four bytes per trained parameter.
    """

    gradient: dict[str, Tensor] | None = None

    def optimizer_step(self, denominator: float, value_denominator: float = 0.0) -> StepResult:
        if self.gradient is None:
            scale = self.ranks.dp_size / denominator  # DeepSpeed averages over ranks
            self.gradient = {
                name: found.detach().float().cpu() * scale
                for name, parameter in self._parameters().items()
                if (found := safe_get_full_grad(parameter)) is not None
            }
        return super().optimizer_step(denominator, value_denominator)


def compare_variants(
    run: RecordedRun, v: int, load: Load, variants: Sequence[Settings]
) -> list[Comparison]:
    """Batch ``v`` with the run's own settings, and with those of each of ``variants``.

    All begin with the weights and the optimizer's state that the run had before the batch: from a
    checkpoint, or by training what lies between with the run's own settings. Nothing is written
    into the run's folder. Host memory: 24 bytes per parameter, beside what training takes.

    Raises ``ConfigError`` for settings that the checkpoint does not fit, ``ValueError`` where the
    journal does not go back to it.
    """
    configs = [load(settings) for settings in ((), *variants)]  # before a model is loaded
    with TemporaryDirectory() as temporary:
        begin = _state_before(run, v, configs[0], Path(temporary))
        own = _measure(run, v, (), configs[0], begin)
        others = zip(variants, configs[1:], strict=True)
        return [
            compare(own, own),
            *(compare(own, _measure(run, v, each, config, begin)) for each, config in others),
        ]


def _state_before(run: RecordedRun, v: int, config: Config, temporary: Path) -> Path:
    """Folder of checkpoints of which the newest before batch ``v`` has the state before it."""
    if run.replay_begins(v) == v:
        return run.folder / CHECKPOINT_FOLDER

    def save(trainer: Trainer) -> None:
        engine, progress = trainer.accumulator.engine, trainer.progress
        collectives = trainer.accumulator.collectives
        with Checkpoints(temporary, 1, engine, collectives, background=False) as checkpoints:
            checkpoints.save(progress.step, {"progress": asdict(progress)})

    replay_batch(run, v - 1, _readable(config), behind=save)
    return temporary


def _measure(run: RecordedRun, v: int, settings: Settings, config: Config, begin: Path) -> Measured:
    weights: dict[int, dict[str, Tensor]] = {}  # by closed batches
    gradient: dict[str, Tensor] = {}

    def keep_weights(closed: int, engine: DeepSpeedEngine) -> None:
        weights[closed] = {name: w.detach().float().clone() for name, w in engine.named_weights()}

    def keep_gradient(trainer: Trainer) -> None:
        engine = trainer.accumulator.engine
        assert isinstance(engine, KeptGradient)
        gradient.update(engine.gradient or {})

    replayed = replay_batch(
        run,
        v,
        _readable(config),
        keep_weights,
        behind=keep_gradient,
        checkpoints=begin,
        engine_type=KeptGradient,
    )
    update = {name: after - weights[v][name] for name, after in weights[v + 1].items()}
    return Measured(settings, replayed.metrics, gradient, update)


def _readable(config: Config) -> Config:
    """ZeRO-2 frees gradients in ways that do not let them be read; in one process ZeRO-1 computes
    the same."""
    stage = min(config.trainer.zero_stage, 1)
    return config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"zero_stage": stage})}
    )
