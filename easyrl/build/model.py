"""The model and its optimizer, and how many steps their schedule has."""

from __future__ import annotations

from dataclasses import dataclass

from easyrl.build.ledger import last_certified_step
from easyrl.build.run import OpenRun
from easyrl.build.steps import total_steps, trained_before
from easyrl.engines.base import TrainEngine
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.engines.group.leader import GroupLeader
from easyrl.ledger.earlier_run import EarlierRun
from easyrl.recipes.loading import load_recipe


@dataclass(frozen=True)
class LoadedModel:
    """As ``model.path`` has it: no checkpoint is loaded yet."""

    engine: TrainEngine
    num_steps: int | None  # of the whole run; None: nobody knows
    resume_at_most: int | None  # the step whose checkpoint, or an earlier one, is to be loaded


def load_model(run: OpenRun, num_prompts: int, earlier: EarlierRun | None) -> LoadedModel:
    """``num_prompts``: of one epoch. Collective. Raises ``ConfigError``."""
    folder = run.output / "checkpoints"
    certified = last_certified_step(earlier, folder, run.collectives)
    step, position = trained_before(folder, certified) if run.resume else (0, 0)
    num_steps = total_steps(
        run.config,
        num_prompts,
        step=step,
        position=position,
        rejects=load_recipe(run.config).rejects,
    )
    return LoadedModel(_open_engine(run, num_steps), num_steps, certified)


def _open_engine(run: OpenRun, num_steps: int | None) -> TrainEngine:
    """DeepSpeed's; of a model that is split, the leader of this head's group."""
    group = run.group
    if group is None:
        return DeepSpeedEngine(run.config, total_steps=num_steps)
    from easyrl.engines.megatron.engine import MegatronEngine  # megatron-core may not be installed

    group.calls.tell(("engine", (num_steps,)))
    own = MegatronEngine(run.config, group.place.layout, total_steps=num_steps)
    run.opened.callback(group.files.tell_last, None)
    layout = group.place.layout
    writers = [layout.writer(stage) for stage in range(layout.pipeline)]
    return GroupLeader(
        own,
        group.calls,
        group.files,
        group.teller,
        writers if group.place.data == 0 else [],
        layout.pipeline - 1 if layout.is_open_schedule else 0,
    )
