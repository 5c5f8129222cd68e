"""All parts of a run: data first, then the model, then the endpoints; what fails cheaply first."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch.distributed as dist

from easyrl.build.accumulation import build_accumulator
from easyrl.build.data import load_data, load_held_out, load_tokenizer
from easyrl.build.endpoints import (
    build_weight_sync,
    follow_membership,
    start_servers,
    warn_of_short_contexts,
)
from easyrl.build.inference import open_inference
from easyrl.build.ledger import Due, SavedAttempts, open_notary, reference_identity
from easyrl.build.recipe import say_what_cannot_act
from easyrl.build.steps import total_steps, trained_before
from easyrl.config import Config, EvaluationConfig
from easyrl.dataloaders.prompts.dataset import PromptBatches
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.engines.process_group import start_process_group
from easyrl.inference_client.errors import is_outage
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.ledger.journal import Journal, JournalledRollouts, group_settings
from easyrl.metrics.event_log import ignore
from easyrl.metrics.logprob_mismatch import LogprobAgreement
from easyrl.metrics.throughput import Throughput
from easyrl.rewards.startup import check_rewards
from easyrl.runtime.collectives import Agreement, PeerOutage
from easyrl.runtime.determinism import (
    is_strict,
    make_deterministic,
    remember_arithmetic,
    require_invariant_endpoints,
)
from easyrl.runtime.run_folder import (
    begin_attempt,
    keep_config,
    open_event_log,
    open_trackers,
    prepare_output,
)
from easyrl.runtime.signals import RunSignals
from easyrl.runtime.watchdog import STUCK, UNWIND_S, TokenProgress, Watchdog
from easyrl.schema import PolicyVersion, StopRequested
from easyrl.trainer.evaluation import Evaluator
from easyrl.trainer.loop import AfterReport, Hook, Progress, Trainer


@dataclass
class Parts:
    """What a caller needs after building."""

    trainer: Trainer
    engine: DeepSpeedEngine


def build_parts(config: Config, opened: ExitStack, *, resume: bool, signals: RunSignals) -> Parts:
    """``opened`` closes what was opened, in reverse order."""
    stop = signals.stop
    make_deterministic(config)
    check_rewards(config.rewards)
    start_process_group()
    agreement = Agreement(dist.get_rank(), dist.get_world_size())
    output = prepare_output(config, agreement, opened, resume=resume)
    if agreement.rank == 0:
        say_what_cannot_act(config)
    own_urls = start_servers(config, opened)
    tokenizer = load_tokenizer(config)
    prompts = load_data(config.data, tokenizer, "data")
    held_out = load_held_out(config.evaluation, tokenizer)
    batches = PromptBatches(
        prompts,
        config.trainer.batch_size,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        epochs=config.data.epochs,
    )
    checkpoint_folder = config.run.output_dir / "checkpoints"
    step, position = trained_before(checkpoint_folder) if resume else (0, 0)
    num_steps = total_steps(
        config.trainer, len(prompts) * config.data.epochs, step=step, position=position
    )

    engine = DeepSpeedEngine(config, total_steps=num_steps)
    notices = agreement.open_notices()
    stop.follow_peers(notices)
    if engine.rank == 0:
        remember_arithmetic(config, output)
    tokens = TokenProgress()
    record = tokens.counting(open_event_log(config, output, agreement, opened))
    checkpoints = opened.enter_context(  # a run that ends well waits for its last checkpoint
        Checkpoints(
            checkpoint_folder,
            config.checkpoint.keep,
            engine,
            agreement,
            config.checkpoint.background,
            record=record,
        )
    )
    version = begin_attempt(config, output, agreement)
    journal = Journal(
        output / "journal",
        version.attempt,
        agreement.rank,
        config.journal.fsync,
        settings=group_settings(config),
    )
    attempts = SavedAttempts(
        config,
        checkpoints,
        journal if agreement.rank == 0 else None,
        reference_identity(config, agreement),
    )
    progress = attempts.resume(batches) if resume else Progress(cursor=batches.state())

    urls: list[str] = agreement.from_rank_zero(own_urls)
    inference = open_inference(config, opened, urls=urls, num_shares=engine.dp_size, record=record)
    remembers = output if engine.rank == 0 else None
    require_invariant_endpoints(config, inference.pool, remembers)
    warn_of_short_contexts(config, inference, rollout=True)
    weight_sync = build_weight_sync(
        config, version.run, engine, agreement, inference, prompts, stop
    )
    opened.callback(weight_sync.close)
    inference.pool.set_repair(weight_sync.repair)
    follow_membership(inference, output, urls, agreement, opened)
    rollouts = JournalledRollouts(
        inference.rollouts(config.rollout, config.rollout.num_generations, config),
        journal,
        repeats_drains=not is_strict(config),
    )
    opened.callback(rollouts.close)
    notary = open_notary(config, output, version, batches, progress, agreement, opened)
    if agreement.rank == 0:
        keep_config(config, output, version.attempt)

    after_publish: list[Hook] = []
    if config.evaluation is not None:
        evaluator = inference.evaluator(
            config.evaluation, held_out, config, agreement, stop, tokens.counting(ignore)
        )
        due = Due(config.evaluation.every_steps, max(progress.reported_step, 0))
        after_publish.append(_evaluation_hook(config.evaluation, due, evaluator, num_steps))
    after_report: list[AfterReport] = []
    if config.checkpoint.every_steps:
        after_report.append(attempts.hook(progress))
    throughput = Throughput(inference.pool, engine.dp_size + len(inference.pool.endpoints))
    trackers = (
        open_trackers(config, output, progress.reported_step, num_steps) if engine.rank == 0 else []
    )
    for tracker in trackers:
        opened.callback(tracker.close)

    trainer = Trainer(
        engine=engine,
        batches=batches,
        rollouts=rollouts,
        weight_sync=weight_sync,
        agreement=agreement,
        accumulator=build_accumulator(
            config,
            engine,
            agreement,
            stop,
            is_interruption=_is_interruption,
            record=record,
            synchronous=config.run.mode == "sync",
        ),
        notary=notary,
        save=lambda: attempts.save_now(progress),
        save_at_end=lambda: attempts.save_at_end(progress),
        record=record,
        after_publish=after_publish,
        watch=LogprobAgreement(config).look if engine.rank == 0 else lambda sums: None,
        after_report=after_report,
        on_step=[throughput.add, *(tracker.log for tracker in trackers)],
        version=version,
        updates_per_batch=config.trainer.updates_per_batch,
        max_steps=config.trainer.max_steps,
        max_bad_steps=config.trainer.max_bad_steps,
        progress=progress,
    )

    def describe() -> str:
        endpoints = "\n".join(map(str, inference.pool.states()))
        return f"{rollouts.num_waiting} finished groups wait for the trainer\n{endpoints}"

    opened.enter_context(
        Watchdog(
            config.watchdog,
            tokens,
            describe,
            lambda: signals.end(STUCK, UNWIND_S),
            in_outage=lambda: inference.pool.in_outage,
            max_outage_s=config.inference.max_outage_s,
            loop=inference.thread.loop,
            notices=notices,
        )
    )
    return Parts(trainer, engine)


def _is_interruption(error: Exception) -> bool:
    """Whether the run ends for now with sound weights."""
    return is_outage(error) or isinstance(error, StopRequested | PeerOutage)


def _evaluation_hook(
    schedule: EvaluationConfig, due: Due, evaluator: Evaluator, num_steps: int
) -> Hook:
    def evaluate(step: int, version: PolicyVersion) -> dict[str, float]:
        wanted = due.passes(step)
        wanted |= step == 0 and schedule.at_start
        wanted |= step >= num_steps and schedule.at_end
        return evaluator.evaluate(str(version)) if wanted else {}

    return evaluate
