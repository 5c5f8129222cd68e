"""The parts of a batch that can be held up, and the cause in which each one's time has to show."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.parts.accounting import held_requests, held_work
from benchmarks.parts.accounting.delays import hold_up_calls
from benchmarks.parts.accounting.held_requests import EVALUATED_TOKENS, Plant
from benchmarks.parts.accounting.runs import WORK
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.ledger.ledger import Ledger
from easyrl.metrics.batch_metrics import BatchTotals
from easyrl.metrics.reporter import StepReporter
from easyrl.trainer.evaluation import RunningEvaluation
from easyrl.trainer.loop import Trainer
from easyrl.weight_sync.proof import Prover
from easyrl.weight_sync.publish import WeightSync
from easyrl.weight_sync.push import WeightPusher

EVALUATION = (
    "evaluation.data.files=[{folder}/prompts.jsonl]",
    "evaluation.data.apply_chat_template=false",
    "evaluation.data.max_prompt_tokens=40",
    "evaluation.data.max_records=4",
    "evaluation.every_steps=1",
    "evaluation.sampling.min_tokens=4",
    f"evaluation.sampling.max_tokens={EVALUATED_TOKENS}",
)
SLOW_ENVIRONMENT = Path(__file__).with_name("slow_environment.py").absolute()
EPISODES = (
    f"environments=[{{{{name: slow, file: {SLOW_ENVIRONMENT}}}}}]",
    "rewards=[]",
    "data.files=[{folder}/episodes.jsonl]",
    f"inference.max_inflight={WORK.batch_size * WORK.num_generations}",  # all at once
    "rollout.min_tokens=60",
    "rollout.max_tokens=60",
)


class Part(NamedTuple):
    """Something that can be held up, and where its time has to show."""

    plant: Plant
    causes: tuple[str, ...]  # of the rank's lane, or else of the endpoint's
    lane: str = "rank"
    before_begin: bool = False  # it comes before a batch's ``begin``
    while_training_waits: bool = False  # else training would hide it
    # where it shows in a synchronous run, too, which has one wait for all groups and no look-ahead
    in_sync: bool = True
    settings: tuple[str, ...] = ()  # that a run needs to have this part; {folder}: of the workload
    num_endpoints: int = 1


def _calls(owner: Any, method: str) -> Plant:
    return partial(hold_up_calls, owner, method)


PARTS = {
    "dispatch": Part(_calls(JournalledRollouts, "begin"), ("begin",), before_begin=True),
    "settle": Part(_calls(WeightSync, "settle"), ("settle",)),
    "first response": Part(held_requests.first_requests, ("first group",), in_sync=False),
    "later responses": Part(
        held_requests.last_group, ("starved",), while_training_waits=True, in_sync=False
    ),
    # nobody says why a prompt is not sent
    "pause between requests": Part(held_work.pause, ("unexplained",), "endpoint"),
    "rewards": Part(held_work.rewards, ("idle: rewards",), "endpoint", while_training_waits=True),
    "look-ahead": Part(
        held_work.look_ahead,
        ("look_ahead",),
        while_training_waits=True,  # so that it looks ahead to the end
        in_sync=False,
        settings=("recipe.kl_coef=0.001",),
    ),
    "tail": Part(held_requests.last_group, ("tail",), "endpoint"),
    "failing endpoint": Part(held_requests.failing_request, ("failed",), "endpoint"),
    "environment": Part(
        held_work.nothing_here, ("idle: environments",), "endpoint", settings=EPISODES
    ),
    # one request of one endpoint; of the other's lane
    "others' tail": Part(
        held_requests.one_of_an_endpoint,
        ("idle: others' tail",),
        "endpoint",
        num_endpoints=2,
    ),
    # ... to which the prompt goes that replaces a rejected one
    "rejected group": Part(
        held_requests.rejected_last_group,
        ("idle: no prompt left",),
        "endpoint",
        num_endpoints=2,
    ),
    "packing": Part(_calls(BatchTotals, "add_counts"), ("pack",)),
    "training": Part(_calls(DeepSpeedEngine, "forward_backward"), ("train",)),
    # of a run of one rank: what it does to be with the others
    "ranks": Part(_calls(Trainer, "_merged"), ("ranks",)),
    "evaluation": Part(_calls(RunningEvaluation, "finish"), ("evaluation",), settings=EVALUATION),
    "evaluation, at the endpoint": Part(
        held_requests.evaluations,
        ("evaluation",),
        "endpoint",
        while_training_waits=True,
        settings=EVALUATION,
    ),
    "check": Part(_calls(Ledger, "check"), ("check",)),
    "step": Part(_calls(DeepSpeedEngine, "optimizer_step"), ("step",)),
    "push": Part(_calls(WeightPusher, "push"), ("push",), "endpoint"),
    "probe": Part(
        held_work.probe,
        ("probe",),
        "endpoint",
        settings=("weight_sync.probe=true", "weight_sync.canary_tolerance=100"),
    ),
    "proof": Part(_calls(Prover, "prove_bits"), ("proof",), "endpoint"),
    # the tolerance is of log-probabilities that nobody has computed
    "canary": Part(
        _calls(Prover, "compare_samples"),
        ("canary",),
        "endpoint",
        settings=("weight_sync.canary=true", "weight_sync.canary_tolerance=100"),
    ),
    # the same delays as others', or the like, as an endpoint's lane has them
    "first response, at the endpoint": Part(
        held_requests.first_requests, ("generating",), "endpoint"
    ),
    "step, at the endpoint": Part(
        _calls(DeepSpeedEngine, "optimizer_step"), ("idle: training",), "endpoint"
    ),
    "border, at the endpoint": Part(_calls(WeightSync, "publish"), ("idle: border",), "endpoint"),
    "push, at the trainer": Part(_calls(WeightPusher, "push"), ("sync",)),
    "ledger": Part(_calls(Ledger, "close_batch"), ("ledger",)),
    "report": Part(_calls(StepReporter, "report"), ("report",)),
    "checkpoint": Part(_calls(Ledger, "save_if_due"), ("save",)),
}
