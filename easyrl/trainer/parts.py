"""What the training loop is given: interfaces of the parts that it calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from easyrl.ledger.certificate.records import BatchRecord
from easyrl.metrics.batch_metrics import Update
from easyrl.schema import (
    Confirmation,
    EndedBy,
    ExcludedPrompt,
    GroupOutcome,
    Key,
    PolicyVersion,
    Progress,
    Published,
    ServedWeights,
)
from easyrl.trainer.accumulation import GroupSource


class Membership(Protocol):
    """What became of an open batch as a whole (``BatchMembership``)."""

    @property
    def ended_by(self) -> EndedBy: ...


class OpenBatch(Protocol):
    """A batch in the making: its groups by optimizer step (``producer.open_batch.OpenBatch``)."""

    @property
    def updates(self) -> Sequence[GroupSource]: ...
    @property
    def accepted_versions(self) -> Collection[str]: ...
    @property
    def discarded(self) -> Collection[Key]: ...
    @property
    def refused(self) -> Sequence[GroupOutcome]:
        """This rank's rejected and excluded groups, whole when the last update has ended."""

    @property
    def membership(self) -> Membership: ...
    @property
    def withdrawn(self) -> str | None:
        """Why groups of it were taken back after they had been handed out."""

    def close(self) -> None: ...


class Rollouts(Protocol):
    """Starts the generation of batches (``JournalledRollouts``)."""

    def has_more(self, position: int) -> bool: ...
    def begin(
        self, served: ServedWeights, position: int, excluded: Sequence[ExcludedPrompt]
    ) -> OpenBatch: ...
    def sync(self) -> None: ...
    def withdraw_endpoints(self, problems: Mapping[str, str]) -> None:
        """Withdraws all that endpoints have made for the open batch; by URL, what is wrong."""

    def share_withdrawals(self) -> None:
        """What one rank has withdrawn, all withdraw. Collective."""


class Publisher(Protocol):
    """Brings weights to every endpoint and proves it (``WeightSync``)."""

    @property
    def confirmations(self) -> tuple[Confirmation, ...]: ...
    def publish(
        self,
        version: PolicyVersion,
        meanwhile: Callable[[], object] = lambda: None,
        *,
        canary_follows: bool = False,
    ) -> Published:
        """Calls ``meanwhile`` on every rank when the weights are on their way, and again if they
        have to be written again. ``canary_follows``: requests may go out before all is proved, and
        no response is handed out before ``settle``."""

    def settle(self, published: Published) -> Published:
        """Waits for the rest of the proof, if one is owed; adds its figures. Collective."""


class RunningEvaluation(Protocol):
    """Held-out prompts that the endpoints answer in the background. Collective."""

    def finish(self) -> dict[str, float]:
        """Waits for the rest of them; the metrics. Called again: of what was withdrawn since."""

    def close(self) -> None:
        """Gives up what is not finished. Safe to call twice."""


class Evaluation(Protocol):
    """Evaluates when it is due (``ScheduledEvaluation``). Collective."""

    def begin(
        self, step: int, version: PolicyVersion, *, is_last: bool, again: bool = False
    ) -> RunningEvaluation | None:
        """Starts one if it is due, or ``again``; ``is_last``: the run ends with this step."""


class Ledger(Protocol):
    """Certificate and checkpoints (``ledger.ledger.Ledger``). All ranks call every method."""

    def check(self, account: BatchRecord, *, whole: bool) -> None: ...
    def close_batch(self, account: BatchRecord) -> None: ...
    def save(self, progress: Progress, *, kept_for: str = "") -> None: ...
    def save_if_due(self, progress: Progress) -> None: ...
    def end(self, progress: Progress, weights: str) -> None: ...


class AlarmActions(Protocol):
    """What follows from a collapse alarm (``alarm_actions.AlarmActions``)."""

    def act(self, ledger: Ledger, progress: Progress) -> None:
        """Behind the metrics of the last closed batch. Raises ``StoppedByAlarm``. Collective."""


class Samples(Protocol):
    """Keeps a few groups of each step to be looked at (``samples.writer.SampleWriter``)."""

    def close_batch(self, step: int, updates: Sequence[Update]) -> dict[str, float]:
        """Of a batch that counts, whose first optimizer step is ``step``; the seconds it took."""


class Memory(Protocol):
    """Peaks of memory by phase of the trainer's thread (``PhaseMemory``)."""

    def take(self) -> dict[str, float]:
        """GiB by metric, since this was called before."""
