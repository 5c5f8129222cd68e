"""All parts of a run: data first, then the model, then the endpoints; what fails cheaply first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from easyrl.build.accumulation import build_accumulator
from easyrl.build.data import (
    load_data,
    load_tokenizer,
    policy_vocabulary,
    require_known_tokens,
)
from easyrl.build.endpoints import (
    build_weight_sync,
    follow_membership,
    require_weight_routes,
    set_aside,
    start_servers,
    warn_of_short_contexts,
)
from easyrl.build.inference import open_inference, open_scoring
from easyrl.build.invariant_endpoints import require_invariant_endpoints
from easyrl.build.ledger import (
    last_certified_step,
    open_certificate,
    open_earlier_run,
    reference_identity,
)
from easyrl.build.recipe import accept_function
from easyrl.build.steps import max_draws, num_epochs, total_steps, trained_before
from easyrl.build.trial import try_attention, try_user_code
from easyrl.completion_check import CompletionLimits
from easyrl.config import Config, ConfigError
from easyrl.config.file import plain_secrets, public_tree
from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.engines.process_group import start_process_group
from easyrl.ledger.certificate.seal import SealKey
from easyrl.ledger.certificate.writer import Certificate
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.ledger.journal.batch import Journal, group_settings
from easyrl.ledger.journal.rollouts import BatchRules, JournalledRollouts
from easyrl.ledger.ledger import Ledger
from easyrl.ledger.ledger import resume as resume_progress
from easyrl.metrics.console import ConsoleView
from easyrl.metrics.event_log import ignore
from easyrl.metrics.logprob_agreement import agreement_limit, not_judged
from easyrl.metrics.logprob_mismatch import LogprobMismatch
from easyrl.metrics.reporter import StepReporter
from easyrl.metrics.trackers import JsonlTracker, TensorBoardTracker, Tracker, WandbTracker
from easyrl.models.supported import model_notices
from easyrl.recipes.loading import load_recipe, notices
from easyrl.rewards.functions import check_rewards
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.determinism import is_strict, make_deterministic, remember_arithmetic
from easyrl.runtime.heartbeats import Heartbeats
from easyrl.runtime.notices import Notices
from easyrl.runtime.rank_coordination import RankCoordination
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.run_files import METRICS_FILE
from easyrl.runtime.run_folder import (
    keep_config,
    next_attempt,
    on_rank_zero,
    open_event_log,
    prepare_output,
)
from easyrl.runtime.signals import RunSignals
from easyrl.runtime.stacks import log_report
from easyrl.runtime.watchdog import STUCK, UNWIND_S, TokenProgress, Watchdog
from easyrl.schema import TEMPORARY_FAILURE, Progress
from easyrl.trainer.evaluation import ScheduledEvaluation
from easyrl.trainer.loop import Trainer

logger = logging.getLogger(__name__)


def build_parts(
    config: Config,
    opened: ExitStack,
    *,
    resume: bool,
    signals: RunSignals,
    on_folder: Callable[[], object] = lambda: None,
    seal_key: SealKey | None = None,
) -> tuple[Trainer, DeepSpeedEngine]:
    """The trainer and its model; ``opened`` closes what was opened, in reverse order.

    ``on_folder`` is called once the run's folder is this process's; ``seal_key``: on the first
    rank, for the certificate. Raises ``ConfigError`` for what cannot be used, ``RunComplete`` where
    nothing is left to do.
    """
    stop = signals.stop
    make_deterministic(config)
    check_rewards(config.rewards)
    said_of_model = model_notices(config.model)  # refuses a model before servers start
    start_process_group()
    ranks = Ranks.data_parallel(dist.get_rank(), dist.get_world_size())
    collectives = Collectives(ranks)
    try_attention(config)
    output = prepare_output(config, collectives, opened, resume=resume)
    on_folder()
    if ranks.is_first:
        said = [*notices(config, load_recipe(config)), not_judged(config), *said_of_model]
        for notice in filter(None, said):
            logger.warning("%s", notice)
        for key in plain_secrets(config):
            logger.warning(
                "%s: is a secret in plain text; it is left out of the run's files and trackers, so "
                "that --resume has to be given it again: better write ${oc.env:NAME} and export "
                "the variable NAME",
                key,
            )
    version = next_attempt(config, output, collectives)
    scoring = open_scoring(config, opened)  # its processes start while the data is read
    tokenizer, vocab_size = load_tokenizer(config), policy_vocabulary(config)
    prompts = load_data(config.data, tokenizer, "data")
    evaluation = config.evaluation
    held_out = load_data(evaluation.data, tokenizer, "evaluation.data") if evaluation else []
    require_known_tokens(config, [*prompts, *held_out], vocab_size)
    on_rank_zero(collectives, lambda: try_user_code(config, prompts[0], scoring))
    order = PromptOrder(
        prompts, seed=config.run.seed, shuffle=config.data.shuffle, epochs=num_epochs(config)
    )
    if num_epochs(config) is None and ranks.is_first and config.data.epochs > 1:
        logger.warning(
            "data.epochs=%d is not used: trainer.max_steps ends the run", config.data.epochs
        )
    earlier = open_earlier_run(config, output, version, order, collectives) if resume else None
    servers = start_servers(config, opened, output / "servers")
    checkpoint_folder = output / "checkpoints"
    certified = last_certified_step(earlier, checkpoint_folder, collectives)
    step, position = trained_before(checkpoint_folder, certified) if resume else (0, 0)
    rejects = load_recipe(config).rejects
    num_steps = total_steps(config, len(prompts), step=step, position=position, rejects=rejects)

    engine = DeepSpeedEngine(config, total_steps=num_steps)
    store = collectives.open_store()
    opened.enter_context(
        Heartbeats(
            None if store is None else store.clone(),  # type: ignore[attr-defined]  # in no stub
            ranks.rank,
            ranks.world_size,
            config.watchdog.peer_timeout_s,
            lambda reason: _end_without_peer(signals, reason),
        )
    )
    peers = Notices(store, ranks.rank)
    opened.enter_context(stop.follows_peers(peers))
    tokens = TokenProgress()
    record = tokens.counting(open_event_log(config, output, collectives, opened))
    checkpoints = opened.enter_context(  # a run that ends well waits for its last checkpoint
        Checkpoints(
            checkpoint_folder,
            config.checkpoint.keep,
            engine,
            collectives,
            config.checkpoint.background,
            record=record,
        )
    )
    journal = Journal(
        output / "journal",
        version.attempt,
        collectives.ranks.rank,
        config.journal.fsync,
        settings=group_settings(config, rejects=rejects),
        limits=CompletionLimits(vocab_size, config.rollout.max_tokens),
        record=record,
    )
    reference = reference_identity(config, collectives)
    try:
        progress = (
            resume_progress(checkpoints, order, reference, certified) if resume else Progress()
        )
    except ValueError as error:  # other settings than those of the checkpoint
        raise ConfigError(f"--resume: {error}") from error

    urls, own_keys = collectives.broadcast([servers.urls, servers.api_keys])
    inference = open_inference(
        config,
        opened,
        scoring,
        vocab_size=vocab_size,
        urls=urls,
        own_keys=own_keys,
        last_ends=servers.last_ends,
        num_shares=ranks.dp_size,
        record=record,
    )
    require_weight_routes(inference)
    warn_of_short_contexts(config, inference, rollout=True)
    weight_sync = build_weight_sync(
        config, version.run, engine, collectives, inference, prompts, stop
    )
    opened.callback(weight_sync.close)
    inference.pool.set_repair(weight_sync.confirmed.repair)
    require_invariant_endpoints(config, inference.pool, output if ranks.is_first else None)
    # From here on the folder is written: whatever could be refused has been.
    certificate = open_certificate(
        config, output, version, order, progress, earlier, collectives, opened, seal_key
    )
    if ranks.is_first:
        keep_config(config, output, version.attempt)
        remember_arithmetic(config, output)
    follow_membership(inference, output, urls, collectives, opened)
    rollouts = JournalledRollouts(
        inference.rollouts(),
        journal,
        order,
        BatchRules(
            config.trainer.batch_size,
            config.trainer.updates_per_batch,
            max_draws=max_draws(config),
            max_excluded=config.data.max_excluded,
            accept=accept_function(config),
            in_prompt_order=is_strict(config),
        ),
        ranks,
        RankCoordination(collectives),
    )
    opened.callback(rollouts.close)
    weight_sync.confirmed.on_failed_proof = rollouts.withdraw
    weight_sync.confirmed.end_batch = rollouts.end_batch
    rollouts.on_withdrawal = lambda why: inference.thread.run(set_aside(inference.pool, why))
    scheduled = None
    if evaluation is not None:
        evaluator = inference.evaluator(
            evaluation, held_out, collectives, stop, tokens.counting(ignore)
        )
        scheduled = ScheduledEvaluation(evaluator, max(progress.reported_step, 0))
    trackers = []
    if ranks.is_first:
        trackers = _open_trackers(config, output, progress.reported_step, num_steps)
    for tracker in trackers:
        opened.callback(tracker.close)
    if certificate is not None:
        opened.callback(_publish_chain, certificate, trackers)
    trainer = Trainer(
        rollouts=rollouts,
        accumulator=build_accumulator(
            config,
            engine,
            collectives,
            stop,
            record=record,
            synchronous=config.run.mode == "sync",
            agreement_limit=agreement_limit(config),
        ),
        weight_sync=weight_sync,
        ledger=Ledger(
            certificate,
            checkpoints,
            order,
            collectives,
            every_steps=config.checkpoint.every_steps,
            step=progress.step,
            journal=journal if ranks.is_first and config.journal.keep != "all" else None,
            reference=reference,
        ),
        reporter=StepReporter(
            inference.pool.idle_s,
            ranks.world_size + len(inference.pool.endpoints),
            evaluation=scheduled,
            trackers=trackers,
            mismatch=LogprobMismatch(config) if ranks.is_first else None,
        ),
        first_version=version,
        groups_per_update=config.trainer.batch_size // config.trainer.updates_per_batch,
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
            notices=peers,
        )
    )
    return trainer, engine


def _end_without_peer(signals: RunSignals, reason: str) -> None:
    """No checkpoint: writing one takes all ranks."""
    log_report(lambda: f"{reason}; ending with status {TEMPORARY_FAILURE}, go on with --resume")
    signals.end(TEMPORARY_FAILURE, UNWIND_S)


def _publish_chain(certificate: Certificate, trackers: Sequence[Tracker]) -> None:
    """Tells the trackers what the certificate was when the attempt ended, however it did."""
    for tracker in trackers:
        tracker.note("certificate", certificate.chain_hash)


def _open_trackers(
    config: Config, output: Path, from_step: int, total_steps: int | None
) -> list[Tracker]:
    """All back ends that the configuration names; their figures go on after ``from_step``."""
    trackers: list[Tracker] = [JsonlTracker(output / METRICS_FILE, from_step)]
    if "tensorboard" in config.run.trackers:
        trackers.append(TensorBoardTracker(output / "tensorboard", from_step))
    if "wandb" in config.run.trackers:
        tree = public_tree(config)
        trackers.append(WandbTracker(config.run.wandb_project, config.run.name, output, tree))
    if config.run.console:
        trackers.append(ConsoleView(total_steps))
    return trackers
