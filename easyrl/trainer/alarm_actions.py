"""What follows from a collapse alarm: a checkpoint that is kept, or the run's end."""

from __future__ import annotations

from dataclasses import dataclass

from easyrl.config.alarms import OnAlarm
from easyrl.metrics.alarms.alarms import Alarms
from easyrl.runtime.collectives import Collectives
from easyrl.schema import Progress, StoppedByAlarm
from easyrl.trainer.parts import Ledger


@dataclass(frozen=True)
class AlarmActions:
    """``alarms.on_alarm``, on all ranks."""

    on_alarm: OnAlarm
    alarms: Alarms | None  # on the first rank, which decides
    collectives: Collectives

    def act(self, ledger: Ledger, progress: Progress) -> None:
        """Once the metrics of the last closed batch are out; collective, unless it only warns.

        Raises ``StoppedByAlarm`` on all ranks.
        """
        if self.on_alarm == "warn":
            return
        taken = [] if self.alarms is None else self.alarms.take()
        told = self.collectives.broadcast([[alarm.name, alarm.text] for alarm in taken])
        if not told:
            return
        if self.on_alarm == "checkpoint":
            ledger.save(progress, kept_for=f"alarm {', '.join(name for name, _ in told)}")
            return
        raise StoppedByAlarm(
            "\n".join(f"alarm {name} behind step {progress.step}: {text}" for name, text in told)
        )
