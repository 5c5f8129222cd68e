"""The groups of each batch: generated, journalled, and taken back from an endpoint that fails."""

from __future__ import annotations

from easyrl.build.data import TrainingData
from easyrl.build.endpoints import Endpoints, set_aside
from easyrl.build.recipe import accept_function
from easyrl.build.run import OpenRun
from easyrl.build.steps import max_draws
from easyrl.dataloaders.packing.cost import cost_of_model_at
from easyrl.ledger.journal.batch import Journal
from easyrl.ledger.journal.rollouts import BatchRules, JournalledRollouts
from easyrl.recipes.loading import load_recipe
from easyrl.runtime.determinism import is_strict
from easyrl.runtime.rank_coordination import RankCoordination


def open_rollouts(
    run: OpenRun, data: TrainingData, endpoints: Endpoints, journal: Journal
) -> JournalledRollouts:
    """The producer of this rank; it starts with the first batch. Collective."""
    config, inference = run.config, endpoints.inference
    balance = config.trainer.balance and run.ranks.dp_size > 1
    rollouts = JournalledRollouts(
        inference.rollouts(),
        journal,
        data.order,
        BatchRules(
            config.trainer.batch_size,
            config.trainer.updates_per_batch,
            max_draws=max_draws(config),
            max_excluded=config.data.max_excluded,
            accept=accept_function(config),
            in_prompt_order=is_strict(config),
            cost_of=cost_of_model_at(config.model.path).of_group if balance else None,
            trained_at_end=load_recipe(config).scope == "batch",
        ),
        run.ranks,
        RankCoordination(run.collectives),
    )
    run.opened.callback(rollouts.close)
    if inference.episodes is not None:
        inference.keep_turn = rollouts.add_turn
    confirmed = endpoints.weight_sync.confirmed
    confirmed.on_failed_proof = rollouts.withdraw
    confirmed.end_batch = rollouts.end_batch
    rollouts.on_withdrawal = lambda why: inference.thread.run(set_aside(inference.pool, why))
    return rollouts
