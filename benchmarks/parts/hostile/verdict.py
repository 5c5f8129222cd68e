"""What is said of all hostile runs together: the figures of the benchmark's last line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.parts.hostile.behaviour import SocketBehaviour
from benchmarks.parts.hostile.plan import RunPlan
from benchmarks.parts.hostile.run import Outcome
from benchmarks.parts.hostile.sockets import kinds_of
from benchmarks.parts.ledger import Ledger
from benchmarks.parts.trained_contents import ContentCheck

MOST_MB_OVER_CALM = 256
SHOWN = 5  # problems of a kind, per run


@dataclass
class Total:
    """Over all runs; each of ``problems`` makes the benchmark fail.

    Attributes:
        wrong_without_gradient: groups that moved no weight, whose answers nobody compares.
        unmet: the kinds of listeners that a behaviour has not met in a run of several ranks.
        calm_mb: peak of the run that nothing happened to, by its number of ranks.
        peak_over_calm_mb: the most that any other run was above the one of as many ranks.
    """

    happened: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    crashed: int = 0
    prompts_lost: int = 0
    prompts_trained_twice: int = 0
    wrong_content_trained: int = 0
    wrong_without_gradient: int = 0
    resume_failed: int = 0
    unmet: dict[str, frozenset[str]] = field(default_factory=dict)
    calm_mb: dict[int, float] = field(default_factory=dict)
    peak_over_calm_mb: float = 0.0
    problems: list[str] = field(default_factory=list)

    def line(self) -> dict[str, int]:
        """The benchmark's last line."""
        return {
            "behaviours": sum(count > 0 for count in self.happened.values()),
            "runs": self.runs,
            "crashed": self.crashed,
            "prompts_lost": self.prompts_lost,
            "prompts_trained_twice": self.prompts_trained_twice,
            "wrong_content_trained": self.wrong_content_trained,
            "wrong_without_gradient": self.wrong_without_gradient,
            "resume_failed": self.resume_failed,
            "peak_over_calm_mb": round(self.peak_over_calm_mb),
        }

    def is_good(self) -> bool:
        return not self.problems and self.peak_over_calm_mb <= MOST_MB_OVER_CALM

    def add(
        self,
        name: str,
        plan: RunPlan,
        outcome: Outcome,
        ledger: Ledger | None,
        check: ContentCheck | None,
        verdict: str,
    ) -> None:
        """Counts a run and prints its line."""
        problems = [*outcome.crashed, *outcome.resume_failed]
        self.crashed += len(outcome.crashed)
        self.resume_failed += len(outcome.resume_failed)
        if ledger is not None and check is not None:
            excluded = ledger.prompts_excluded + ledger.prompts_skipped
            self.prompts_lost += ledger.prompts_lost + excluded
            self.prompts_trained_twice += ledger.prompts_trained_twice
            self.wrong_content_trained += ledger.wrong_version_trained + len(check.wrong_groups)
            self.wrong_without_gradient += len(check.wrong_without_gradient)
            problems += [f"{name}: {problem}" for problem in ledger.problems[:SHOWN]]
            problems += [f"{name}: wrong content: {wrong}" for wrong in check.wrong_groups[:SHOWN]]
            if excluded:
                problems.append(f"{name}: {excluded} prompts excluded or skipped")
            if not check.sees_old_weights:
                problems.append(f"{name}: old weights would not show ({check.visible} nats)")
            if verdict != "on-policy":
                self.wrong_content_trained += 1
                problems.append(f"{name}: easyrl verify: {verdict}")
        self.happened.update(outcome.happened)
        self.problems += problems
        if plan.number < 0:
            self.calm_mb[plan.num_ranks] = outcome.peak_mb
        else:
            self.runs += 1
            over_mb = outcome.peak_mb - self.calm_mb[plan.num_ranks]
            self.peak_over_calm_mb = max(self.peak_over_calm_mb, over_mb)
        if plan.num_ranks > 1:
            for behaviour in plan.behaviours:
                if isinstance(behaviour, SocketBehaviour):
                    met = outcome.met.get(behaviour.name, ())
                    self.unmet[behaviour.name] = kinds_of(plan.num_ranks).difference(met)
        kinds = ", ".join(_count(outcome, behaviour.name) for behaviour in plan.behaviours)
        contents = "" if check is None else (
            f"{check.num_responses} responses agree within {check.largest:.1e} nats "
            f"(a batch before: {check.visible or 0:.2f}), but for "
            f"{len(check.wrong_without_gradient)} groups without a gradient; "
        )  # fmt: skip
        print(
            f"{name}: {'good' if not problems else 'BAD'}, {outcome.seconds:.0f} s, "
            f"{outcome.peak_mb:.0f} MB, attempts ended {outcome.statuses}; {contents}{kinds}"
        )
        for problem in problems:
            print(f"  {problem}")


def _count(outcome: Outcome, name: str) -> str:
    happened = outcome.happened[name]
    streams = " of streams" if happened and outcome.streamed[name] == happened else ""
    return f"{name} {happened}{streams}"
