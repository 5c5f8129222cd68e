"""The parts of a batch that can be held up, and the cause in which each one's time has to show."""

from __future__ import annotations

from typing import Any, NamedTuple

from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.ledger.ledger import Ledger
from easyrl.metrics.batch_metrics import BatchTotals
from easyrl.metrics.reporter import StepReporter
from easyrl.rewards.scorer import Scorer
from easyrl.trainer.evaluation import RunningEvaluation
from easyrl.trainer.look_ahead import LookAhead
from easyrl.trainer.loop import Trainer
from easyrl.weight_sync.proof import Prover
from easyrl.weight_sync.publish import WeightSync
from easyrl.weight_sync.push import WeightPusher


class Part(NamedTuple):
    """Something that can be held up, and where its time has to show."""

    owner: Any
    method: str
    causes: tuple[str, ...]  # of the rank's lane, or else of the endpoint's
    lane: str = "rank"
    is_async: bool = False
    of_last_group: bool = False  # of each batch, not of its first call
    while_training_waits: bool = False  # else training would hide it
    # where it shows in a synchronous run, too, which has one wait for all groups and no look-ahead
    in_sync: bool = True
    settings: tuple[str, ...] = ()  # that a run needs to have this part; {folder}: of the workload
    num_endpoints: int = 1
    # where the order of a batch's requests has to be another one for the delay to be seen: what it
    # is compared with has that order, too, and no delay
    reorders: bool = False


EVALUATION = (
    "evaluation.data.files=[{folder}/prompts.jsonl]",
    "evaluation.data.apply_chat_template=false",
    "evaluation.data.max_prompt_tokens=40",
    "evaluation.data.max_records=4",
    "evaluation.every_steps=1",
    "evaluation.sampling.min_tokens=4",
    "evaluation.sampling.max_tokens=8",
)
# A probe is shown once in a run's attempt, before the first batch, which is not counted.
PARTS = {
    "dispatch": Part(JournalledRollouts, "begin", ("begin",)),
    "settle": Part(WeightSync, "settle", ("settle",)),
    "first response": Part(EndpointPool, "ask", ("first group",), is_async=True, in_sync=False),
    "later responses": Part(
        EndpointPool,
        "ask",
        ("starved",),
        is_async=True,
        of_last_group=True,
        while_training_waits=True,
        in_sync=False,
        reorders=True,
    ),
    # nobody says why a prompt is not sent
    "pause between requests": Part(
        RolloutGenerator, "_group", ("unexplained",), "endpoint", is_async=True, reorders=True
    ),
    "rewards": Part(
        Scorer,
        "score_group",
        ("idle: rewards",),
        "endpoint",
        is_async=True,
        of_last_group=True,
        while_training_waits=True,
        reorders=True,
    ),
    "look-ahead": Part(
        LookAhead,
        "work",
        ("look_ahead",),
        while_training_waits=True,  # so that it looks ahead to the end
        in_sync=False,
        settings=("recipe.kl_coef=0.001",),
    ),
    "tail": Part(
        EndpointPool,
        "ask",
        ("tail",),
        "endpoint",
        is_async=True,
        of_last_group=True,
        reorders=True,
    ),
    # one request of one endpoint; of the other's lane
    "others' tail": Part(
        EndpointPool,
        "ask",
        ("idle: others' tail",),
        "endpoint",
        is_async=True,
        num_endpoints=2,
        reorders=True,
    ),
    "packing": Part(BatchTotals, "add_group", ("pack",)),
    "training": Part(DeepSpeedEngine, "forward_backward", ("train",)),
    # of a run of one rank: what it does to be with the others
    "ranks": Part(Trainer, "_merged", ("ranks",)),
    "evaluation": Part(RunningEvaluation, "finish", ("evaluation",), settings=EVALUATION),
    "check": Part(Ledger, "check", ("check",)),
    "step": Part(DeepSpeedEngine, "optimizer_step", ("step",)),
    "push": Part(WeightPusher, "push", ("push",), "endpoint", is_async=True),
    "proof": Part(Prover, "prove_bits", ("proof",), "endpoint", is_async=True),
    # the tolerance is of log-probabilities that nobody has computed
    "canary": Part(
        Prover,
        "compare_samples",
        ("canary",),
        "endpoint",
        is_async=True,
        settings=("weight_sync.canary=true", "weight_sync.canary_tolerance=100"),
    ),
    # the same delays as others', or the like, as an endpoint's lane has them
    "first response, at the endpoint": Part(
        EndpointPool, "ask", ("generating",), "endpoint", is_async=True
    ),
    "step, at the endpoint": Part(
        DeepSpeedEngine, "optimizer_step", ("idle: training",), "endpoint"
    ),
    "border, at the endpoint": Part(WeightSync, "publish", ("idle: border",), "endpoint"),
    "push, at the trainer": Part(WeightPusher, "push", ("sync",), is_async=True),
    "ledger": Part(Ledger, "close_batch", ("ledger",)),
    "report": Part(StepReporter, "report", ("report",)),
    "checkpoint": Part(Ledger, "save_if_due", ("save",)),
}
