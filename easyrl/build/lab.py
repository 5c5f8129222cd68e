"""The parts of ``easyrl lab``: replays of one batch, each with a gradient that is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from easyrl.build.replay import Replayed, replay_batch
from easyrl.config import Config
from easyrl.engines.base import StepResult
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.lab.variants import Comparison, Measured, compare
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.ledger.recorded_run import RecordedRun
from easyrl.ledger.traces import CHECKPOINT_FOLDER
from easyrl.recipes.loading import load_recipe, ratio_keys_at_rest
from easyrl.trainer.loop import Trainer

Settings = Sequence[str]  # key.path=value
Load = Callable[[Settings], Config]  # the attempt's configuration with these in place of its own


class KeptGradients(DeepSpeedEngine):
    """An engine that keeps the gradient of each of its steps, divided by the denominator.

    Host memory: four bytes per trained parameter and step.
    """

    gradients: tuple[dict[str, Tensor], ...] = ()

    def optimizer_step(self, denominator: float, value_denominator: float = 0.0) -> StepResult:
        scale = self.ranks.dp_size / denominator  # DeepSpeed averages over ranks
        gradient = {
            name: found.detach().float().cpu() * scale
            for name, parameter in self._parameters().items()
            if (found := safe_get_full_grad(parameter)) is not None
        }
        self.gradients = (*self.gradients, gradient)
        return super().optimizer_step(denominator, value_denominator)


class Experiment(NamedTuple):
    """A batch with several settings, the run's own first."""

    rows: list[Comparison]
    own: Replayed  # with the run's own settings, from where the experiment began
    at_rest: list[str]  # why settings that were asked for cannot act


def compare_variants(
    run: RecordedRun, v: int, load: Load, variants: Sequence[Settings]
) -> Experiment:
    """Batch ``v`` with the run's own settings, and with those of each of ``variants``.

    All begin with the weights and the optimizer's state that the run had before the batch: from a
    checkpoint, or by training what lies between with the run's own settings. Nothing is written
    into the run's folder. Host memory: 24 bytes per parameter, and 8 more for each further update
    of a batch, beside what training takes.

    Raises ``ConfigError`` for settings that the checkpoint does not fit, ``ValueError`` where the
    journal does not go back to it.
    """
    configs = [load(settings) for settings in ((), *variants)]  # before a model is loaded
    with TemporaryDirectory() as temporary:
        earlier = _train_up_to(run, v, configs[0], Path(temporary))
        begin = run.folder / CHECKPOINT_FOLDER if earlier is None else Path(temporary)
        own, replayed = _measure(run, v, (), configs[0], begin)
        others = list(zip(variants, configs[1:], strict=True))
        rows = [
            compare(own, own),
            *(compare(own, _measure(run, v, each, config, begin)[0]) for each, config in others),
        ]
    if earlier is not None:
        in_prompt_order = earlier.in_prompt_order | replayed.in_prompt_order
        replayed = replace(replayed, first=earlier.first, in_prompt_order=in_prompt_order)
    at_rest = [_at_rest(each, config) for each, config in others]
    return Experiment(rows, replayed, list(dict.fromkeys(filter(None, at_rest))))


def _at_rest(settings: Settings, config: Config) -> str | None:
    """That keys of a ratio, such as a clip, cannot act, where ``settings`` has one of them."""
    recipe = load_recipe(config)
    asked = {setting.partition("=")[0] for setting in settings}
    if asked.isdisjoint(f"recipe.{key}" for key in recipe.ratio_keys):
        return None
    return ratio_keys_at_rest(config, recipe)


def _train_up_to(run: RecordedRun, v: int, config: Config, temporary: Path) -> Replayed | None:
    """Trains what lies between the newest checkpoint and batch ``v``, for a checkpoint in
    ``temporary``; None if there is nothing between them."""
    if run.replay_begins(v) == v:
        return None

    def save(trainer: Trainer) -> None:
        engine, progress = trainer.accumulator.engine, trainer.progress
        collectives = trainer.accumulator.collectives
        with Checkpoints(temporary, 1, engine, collectives, background=False) as checkpoints:
            checkpoints.save(progress.step, {"progress": asdict(progress)})

    return replay_batch(run, v - 1, _readable(config), behind=save)


def _measure(
    run: RecordedRun, v: int, settings: Settings, config: Config, begin: Path
) -> tuple[Measured, Replayed]:
    weights: dict[int, dict[str, Tensor]] = {}  # by closed batches
    gradients: list[dict[str, Tensor]] = []

    def keep_weights(closed: int, engine: DeepSpeedEngine) -> None:
        weights[closed] = {name: w.detach().float().clone() for name, w in engine.named_weights()}

    def keep_gradients(trainer: Trainer) -> None:
        engine = trainer.accumulator.engine
        assert isinstance(engine, KeptGradients)
        gradients.extend(engine.gradients)

    replayed = replay_batch(
        run,
        v,
        _readable(config),
        keep_weights,
        behind=keep_gradients,
        checkpoints=begin,
        engine_type=KeptGradients,
    )
    update = {name: after - weights[v][name] for name, after in weights[v + 1].items()}
    gradients = gradients or [{}]  # no step is taken on a batch without signal
    return Measured(settings, replayed.metrics, gradients, update), replayed


def _readable(config: Config) -> Config:
    """ZeRO-2 frees gradients in ways that do not let them be read; in one process ZeRO-1 computes
    the same."""
    stage = min(config.trainer.zero_stage, 1)
    return config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"zero_stage": stage})}
    )
