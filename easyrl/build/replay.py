"""The parts of a replay: the trainer's own, with recorded groups and nobody to send weights to."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from easyrl.build.accumulation import build_accumulator
from easyrl.build.ledger import NoNotary
from easyrl.build.steps import total_steps
from easyrl.config import Config, ConfigError
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.inference_client.transfer.artifact import (
    Chunk,
    tensor_checksum,
    weights_digest,
)
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.ledger.recorded_run import RecordedPrompts, RecordedRollouts, RecordedRun
from easyrl.metrics.event_log import ignore
from easyrl.runtime.collectives import Agreement
from easyrl.runtime.determinism import make_deterministic
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import Confirmation, PolicyVersion, Published, ServedWeights
from easyrl.trainer.loop import Progress, Trainer


@dataclass(frozen=True)
class Replayed:
    """What a replay of batches ``first`` to ``last`` came to; the same on every rank."""

    first: int
    last: int
    from_step: int  # of the checkpoint it began with; 0: the initial model
    metrics: dict[str, float]  # of the last batch
    weights: dict[int, str]  # digests by closed batches: before ``first`` ... behind ``last``
    rank: int
    num_ranks: int
    in_prompt_order: frozenset[int] = frozenset()  # batches not trained in the run's order


class HashedWeights:
    """A ``Publisher`` that sends nothing: it only says what an endpoint would have to serve."""

    def __init__(self, engine: DeepSpeedEngine, agreement: Agreement) -> None:
        self._engine = engine
        self._agreement = agreement
        self.digests: dict[int, str] = {}  # by closed batches

    @property
    def confirmations(self) -> tuple[Confirmation, ...]:
        return ()

    def publish(self, version: PolicyVersion) -> Published:
        """Collective."""
        checksums = {}
        for name, weight in self._engine.named_weights():
            if self._agreement.rank == 0:
                checksums[name] = tensor_checksum(weight)
        digest = weights_digest([Chunk("", checksums, 0)])
        self.digests[version.v] = digest = self._agreement.from_rank_zero(digest)
        return Published(ServedWeights(version, digest), {})


def replay_batch(run: RecordedRun, v: int, config: Config) -> Replayed:
    """Trains from the newest checkpoint before batch ``v`` to its end. Every rank calls this.

    Writes nothing into the run's folder. Raises ``ConfigError`` if a checkpoint does not fit the
    configuration, ``ValueError`` if the journal does not go back to it.
    """
    make_deterministic(config)
    metrics: dict[str, float] = {}
    with ExitStack() as opened:
        engine = DeepSpeedEngine(config, total_steps=_total_steps(run, v, config))
        agreement = Agreement(engine.dp_rank, engine.dp_size)
        progress = _restore(run, v, engine, agreement)
        first, from_step = progress.closed_batches, progress.step
        run.require_journal(first, v)
        rollouts = RecordedRollouts(run)
        weights = HashedWeights(engine, agreement)
        stop = StopRequest(config.trainer.grace_s)
        opened.callback(stop.close)
        trainer = Trainer(
            engine=engine,
            batches=RecordedPrompts(run, first, v),
            rollouts=rollouts,
            weight_sync=weights,
            agreement=agreement,
            accumulator=build_accumulator(
                config,
                engine,
                agreement,
                stop,
                is_interruption=lambda error: False,
                record=ignore,
                synchronous=False,
            ),
            notary=NoNotary(),
            save=lambda: None,
            record=ignore,
            on_step=[lambda step, measured: metrics.update(measured)],
            version=PolicyVersion(run.run.run, 0, 0),
            updates_per_batch=config.trainer.updates_per_batch,
            max_bad_steps=config.trainer.max_bad_steps,
            progress=progress,
        )
        trainer.fit()
    return Replayed(
        first,
        v,
        from_step,
        metrics,
        weights.digests,
        engine.rank,
        agreement.num_ranks,
        frozenset(rollouts.in_prompt_order),
    )


def _restore(run: RecordedRun, v: int, engine: DeepSpeedEngine, agreement: Agreement) -> Progress:
    """The state before batch ``v`` or an earlier one. Collective."""
    before = run.batch(v - 1).step if v else 0
    folder = run.folder / "checkpoints"
    checkpoints = Checkpoints(folder, 1, engine, agreement, background=False)
    try:
        state = checkpoints.load_latest(at_most=before)
    except ValueError as error:  # other settings than those of the checkpoint
        raise ConfigError(f"{folder}: {error}") from error
    if state is None:
        return Progress()
    # The digest is compared with the certificate's, not with the checkpoint's: the replay may have
    # other settings.
    saved = state["progress"]
    reported = {"reported_step": saved["step"], "unreported": {}}
    return Progress(**(saved | reported | {"weights": "", "cursor": {}}))


def _total_steps(run: RecordedRun, v: int, config: Config) -> int:
    """Where the schedule ends, as it did in the attempt that trained batch ``v``."""
    step, position = run.begun(run.attempt_of(v))
    num_prompts = run.run.num_prompts * config.data.epochs
    return total_steps(config.trainer, num_prompts, step=step, position=position)
