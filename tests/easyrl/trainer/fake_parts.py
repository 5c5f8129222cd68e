"""The training loop's parts as fakes: engine, producer, weight sync, ledger."""

from dataclasses import replace

import numpy as np
import torch

from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.engines.base import MetricSums, StepResult
from easyrl.metrics.reporter import StepReporter
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import (
    BatchWithdrawn,
    Completion,
    Confirmation,
    GroupOutcome,
    NoEndpointServes,
    PolicyVersion,
    Progress,
    Prompt,
    Published,
    RewardError,
    RolloutGroup,
    Score,
    ServedWeights,
    StoppedByAlarm,
    StopRequested,
    TooManyExcluded,
    VersionSpan,
)
from easyrl.trainer.accumulation import Accumulator
from easyrl.trainer.loop import NothingAccepted, Trainer
from tests.recipes import group_functions, run_settings

VERSION = PolicyVersion("run", 0, 0)
GOOD = StepResult(1.0, 1e-3, skipped=False)


def group(index: int, version: str, spans=None) -> RolloutGroup:
    length = 3
    completion = Completion(
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        finish_reason="stop",
        version_spans=spans or (VersionSpan(version, 0, length),),
        endpoint="http://fake:1",
        loss_mask=np.ones(length, dtype=bool),
    )
    prompt = Prompt(index, np.arange(2, dtype=np.int32), "", None)
    scores = (Score(0.0, {"r": 0.0}), Score(1.0, {"r": 1.0}))
    return RolloutGroup(prompt, (completion, completion), scores, version, 0.0, 1.0)


class FakeStream:
    wait_s = 0.5
    first_group_wait_s = 0.25
    load_s = 0.0
    recovered = frozenset()

    def __init__(self, events, groups, version):
        self.events = events
        self.groups = groups
        self.accepted_versions = frozenset([version])
        self.error = None

    def drain_ready(self, max_tokens, idle=None):
        if self.error is not None:
            raise self.error
        return [self.groups.pop(0)] if self.groups else []

    def note_trained(self, num_tokens):
        pass

    def interrupt(self, error):
        self.error = error

    def complete(self):
        self.events.append("complete")


class OutageStream(FakeStream):
    """One group, then no endpoint is left."""

    def drain_ready(self, max_tokens, idle=None):
        if len(self.groups) == 1:
            raise FakeOutage("all endpoints are gone")
        return super().drain_ready(max_tokens, idle)


class FakeBatch:
    """Groups by optimizer step, all of them finished."""

    discarded = frozenset()

    def __init__(self, events, streams, refused, membership):
        self.events = events
        self.updates = streams
        self.refused = refused
        self.membership = membership
        self.accepted_versions = streams[0].accepted_versions
        self.withdrawn = None

    def close(self):
        self.events.append("batch closed")


class FakeRollouts:
    """Finishes groups in the order of their prompts; ``make`` says what becomes of each."""

    stream = FakeStream
    batch = FakeBatch

    def __init__(self, events, make=group, *, num_prompts=4, epochs=1, num_updates=1):
        self.events = events
        self.make = make
        self.num_updates = num_updates
        prompts = [Prompt(i, np.arange(2, dtype=np.int32), "", None) for i in range(num_prompts)]
        self.order = PromptOrder(prompts, shuffle=False, epochs=epochs)

    def has_more(self, position):
        return self.order.num_left(position) != 0

    def begin(self, served, position, excluded=()):
        version = str(served.version)
        membership = BatchMembership(
            2, self.num_updates, num_left=self.order.num_left(position), max_draws=20
        )
        groups, refused, drawn = [[] for _ in range(self.num_updates)], [], []
        while len(drawn) < membership.bound:
            prompt = self.order.prompt(position + len(drawn))
            made = replace(self.make(prompt.index, version), prompt=prompt, position=len(drawn))
            membership.decide(len(drawn), made.refused is None)
            if made.refused is not None:
                refused.append(GroupOutcome.of(made))
            else:
                groups[membership.update_of(len(drawn))].append(made)
            drawn.append(prompt.index)
        self.events.append(f"begin {drawn} {version}")
        streams = [self.stream(self.events, slice_, version) for slice_ in groups]
        return self.batch(self.events, streams, refused, membership)

    def sync(self):
        self.events.append("sync")

    def share_withdrawals(self):
        self.events.append("share withdrawals")


class FakeEngine:
    ranks = Ranks.data_parallel()
    device = torch.device("cpu")
    lockstep = False

    def __init__(self, events, results=()):
        self.events = events
        self.results = list(results)

    def begin_batch(self):
        pass

    def finish_backwards(self):
        return []

    def prepare(self, micro_batches):
        return list(micro_batches)

    def forward_backward(self, micro_batches):
        self.events.append("backward")
        tokens = sum(m.num_loss_tokens for m in micro_batches)
        sums = {"loss_sum": 2.0 * tokens, "num_loss_tokens": tokens, "logprob_diff_sum": 0.0}
        return [MetricSums(sums, {"logprob_diff_max": 0.0})]

    def optimizer_step(self, denominator, value_denominator=0.0):
        self.events.append(f"step /{denominator:g}")
        return self.results.pop(0) if self.results else GOOD

    def discard_gradients(self):
        self.events.append("discard")


class FakeOutage(RuntimeError):
    """No endpoint answers."""


class FakeSync:
    def __init__(self, events):
        self.events = events

    confirmations = (Confirmation("http://fake:1", "any", True, None),)

    def publish(self, version, meanwhile, *, canary_follows=False):
        meanwhile()
        self.events.append(f"publish {version}")
        return Published(ServedWeights(version, f"weights {version.v}"), {"time/sync_s": 0.1})

    def settle(self, published):
        return published


class FakeLedger:
    """Keeps what it was given."""

    def __init__(self, events):
        self.events = events
        self.checked = []
        self.closed = []

    def check(self, account, *, whole):
        self.checked.append((account, whole))

    def close_batch(self, account):
        self.events.append(f"certify {account.batch}")
        self.closed.append(account)

    def save(self, progress, *, kept_for=""):
        self.events.append(f"save for {kept_for}" if kept_for else "save")

    def save_if_due(self, progress):
        pass

    def end(self, progress, weights):
        self.events.append(f"end {weights}")


class FakeEvaluation:
    """Keeps when it was asked, and whether for the last time; each is finished at once."""

    def __init__(self, evaluate=lambda step, version: {}):
        self.function = evaluate
        self.asked = []

    def begin(self, step, version, *, is_last, again=False):
        self.asked.append((step, is_last))
        return FakeRunning(lambda: self.function(step, version))


class FakeRunning:
    def __init__(self, evaluate):
        self.finish = evaluate

    def close(self):
        pass


class ListTracker:
    def __init__(self, reported):
        self.reported = reported

    def log(self, step, metrics):
        self.reported.append((step, dict(metrics)))

    def close(self):
        pass


def make_trainer(
    events,
    *,
    num_batches=2,
    num_prompts=None,
    epochs=1,
    make=group,
    results=(),
    engine=None,
    collectives=None,
    evaluation=None,
    trackers=(),
    weight_sync=None,
    ledger=None,
    stop=None,
    synchronous=False,
    samples_per_step=0,
    record=lambda event, **fields: None,
    progress=None,
    **plan,
):
    engine = engine or FakeEngine(events, results)
    collectives = collectives or Collectives(Ranks.data_parallel(0, 1))
    reported = []

    trainer = Trainer(
        rollouts=FakeRollouts(
            events,
            make,
            num_prompts=2 * num_batches if num_prompts is None else num_prompts,
            epochs=epochs,
            num_updates=plan.get("updates_per_batch", 1),
        ),
        accumulator=Accumulator(
            engine=engine,
            collectives=collectives,
            functions=group_functions(run=run_settings(3), max_tokens_per_micro_batch=100),
            stop=stop or StopRequest(grace_s=60.0),
            is_interruption=lambda error: isinstance(
                error,
                FakeOutage
                | StopRequested
                | StoppedByAlarm
                | BatchWithdrawn
                | TooManyExcluded
                | RewardError
                | NothingAccepted
                | NoEndpointServes,
            ),
            record=record,
            max_tokens=100,
            synchronous=synchronous,
            samples_per_step=samples_per_step,
        ),
        weight_sync=weight_sync or FakeSync(events),
        ledger=ledger or FakeLedger(events),
        reporter=StepReporter(
            num_devices=lambda: 2,
            trackers=[ListTracker(reported), *trackers],
        ),
        evaluation=evaluation,
        first_version=VERSION,
        groups_per_update=2 // plan.get("updates_per_batch", 1),
        **plan,
        progress=progress or Progress(),
    )
    return trainer, reported
