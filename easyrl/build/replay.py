"""The parts of a replay: the trainer's own, with recorded groups and nobody to send weights to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from easyrl.build.accumulation import build_accumulator, rows_per_drain
from easyrl.build.steps import total_steps
from easyrl.build.weights_digest import digest_of_weights
from easyrl.config import Config, ConfigError, LoraConfig
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.ledger.recorded_run import RecordedRollouts, RecordedRun
from easyrl.ledger.traces import CHECKPOINT_FOLDER
from easyrl.metrics.event_log import ignore
from easyrl.metrics.reporter import StepReporter
from easyrl.recipes.loading import load_recipe
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.determinism import make_deterministic
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import APART, Confirmation, PolicyVersion, Progress, Published, ServedWeights
from easyrl.trainer.loop import Trainer


@dataclass(frozen=True)
class Replayed:
    """What a replay of batches ``first`` to ``last`` came to; the same on every rank."""

    first: int
    last: int
    from_step: int  # of the checkpoint it began with; 0: the initial model
    metrics: dict[str, float]  # of the last batch
    weights: dict[int, str]  # digests by closed batches: before ``first`` ... behind ``last``
    ranks: Ranks
    in_prompt_order: frozenset[int] = frozenset()  # batches not trained in the run's order
    metrics_of: dict[int, dict[str, float]] = field(default_factory=dict)  # by step


OnWeights = Callable[[int, DeepSpeedEngine], object]  # closed batches, whose weights it has


class HashedWeights:
    """A ``Publisher`` that sends nothing: it only says what an endpoint would have to serve.

    ``recorded`` gives the digest that the run had, by closed batches, if it had one: it says
    whether adapters, of ``lora``, travelled alone then.
    """

    confirmations: tuple[Confirmation, ...] = ()

    def __init__(
        self,
        engine: DeepSpeedEngine,
        collectives: Collectives,
        on_weights: OnWeights,
        lora: LoraConfig | None,
        recorded: Callable[[int], str | None],
    ) -> None:
        self._engine = engine
        self._lora, self._recorded = lora, recorded
        self._collectives = collectives
        self._on_weights = on_weights
        self.digests: dict[int, str] = {}  # by closed batches

    def settle(self, published: Published) -> Published:
        return published

    def publish(
        self,
        version: PolicyVersion,
        meanwhile: Callable[[], object] = lambda: None,
        *,
        canary_follows: bool = False,
    ) -> Published:
        """Collective."""
        meanwhile()
        self._on_weights(version.v, self._engine)
        recorded = self._recorded(version.v) or ""
        lora = self._lora if recorded.startswith(APART) else None
        digest = digest_of_weights(self._engine, self._collectives, lora)
        self.digests[version.v] = digest
        return Published(ServedWeights(version, digest), {})


class NoLedger:
    """A ``Ledger`` that writes nothing: the batch was written down when it was trained."""

    def _pass(self, *account: Any, **told: Any) -> None:
        pass

    check = close_batch = save = save_if_due = end = _pass


class KeptMetrics:
    """A ``Tracker`` that keeps the metrics of all steps."""

    def __init__(self) -> None:
        self.of_steps: dict[int, dict[str, float]] = {}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.of_steps[step] = metrics

    def note(self, name: str, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def replay_batch(
    run: RecordedRun,
    v: int,
    config: Config,
    on_weights: OnWeights = lambda v, engine: None,
    *,
    behind: Callable[[Trainer], object] = lambda trainer: None,
    checkpoints: Path | None = None,
    engine_type: type[DeepSpeedEngine] = DeepSpeedEngine,
) -> Replayed:
    """Trains from the newest checkpoint before batch ``v`` to its end. Every rank calls this.

    Args:
        on_weights: called before each batch, and behind the last.
        behind: called behind the last with what has trained it.
        checkpoints: their folder; default: the run's.
        engine_type: of the model that is trained.

    Writes nothing into the run's folder. Raises ``ConfigError`` if a checkpoint does not fit the
    configuration, ``ValueError`` if the journal does not go back to it.
    """
    make_deterministic(config)
    with ExitStack() as opened:
        step, position = run.begun(run.attempt_of(v))  # the schedule ends as it did there
        rejects = load_recipe(config).rejects
        num_prompts = run.run.num_prompts
        num_steps = total_steps(config, num_prompts, step=step, position=position, rejects=rejects)
        engine = engine_type(config, total_steps=num_steps)
        collectives = Collectives(engine.ranks)
        folder = checkpoints or run.folder / CHECKPOINT_FOLDER
        progress = _restore(run, v, folder, engine, collectives)
        first, from_step = progress.closed_batches, progress.step
        run.require_journal(first, v)
        num_updates = config.trainer.updates_per_batch
        max_tokens = rows_per_drain(config) * config.trainer.max_tokens_per_micro_batch
        rollouts = RecordedRollouts(run, v, num_updates, max_tokens, engine.ranks)
        weights = HashedWeights(
            engine, collectives, on_weights, config.model.lora, run.weights_before
        )
        kept = KeptMetrics()
        stop = StopRequest(config.trainer.grace_s)
        opened.callback(stop.close)
        trainer = Trainer(
            rollouts=rollouts,
            accumulator=build_accumulator(
                config, engine, collectives, stop, record=ignore, synchronous=False
            ),
            weight_sync=weights,
            ledger=NoLedger(),
            reporter=StepReporter(lambda: engine.ranks.world_size, trackers=[kept]),
            first_version=PolicyVersion(run.run.run, 0, 0),
            groups_per_update=run.run.batch_size // num_updates,
            updates_per_batch=num_updates,
            max_bad_steps=config.trainer.max_bad_steps,
            num_prompts=run.run.num_prompts,
            progress=progress,
        )
        trainer.fit()
        behind(trainer)
    return Replayed(
        first=first,
        last=v,
        from_step=from_step,
        metrics=kept.of_steps[max(kept.of_steps)] if kept.of_steps else {},
        weights=weights.digests,
        ranks=engine.ranks,
        metrics_of=kept.of_steps,
        in_prompt_order=frozenset(rollouts.in_prompt_order),
    )


def _restore(
    run: RecordedRun, v: int, folder: Path, engine: DeepSpeedEngine, collectives: Collectives
) -> Progress:
    """The state before batch ``v`` or an earlier one, from ``folder``. Collective."""
    before = run.batch(v - 1).step if v else 0
    checkpoints = Checkpoints(folder, 1, engine, collectives, background=False)
    try:
        state = checkpoints.load_latest(at_most=before)
    except ValueError as error:  # other settings than those of the checkpoint
        raise ConfigError(f"{folder}: {error}") from error
    if state is None:
        return Progress()
    progress = Progress(**state["progress"])
    # The digest is compared with the certificate's, not with the checkpoint's: the replay may have
    # other settings.
    return replace(progress, reported_step=progress.step, unreported={}, weights="")
