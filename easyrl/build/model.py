"""The model and its optimizer, and how many steps their schedule has."""

from __future__ import annotations

from dataclasses import dataclass

from easyrl.build.ledger import last_certified_step
from easyrl.build.run import OpenRun
from easyrl.build.steps import total_steps, trained_before
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.ledger.earlier_run import EarlierRun
from easyrl.recipes.loading import load_recipe


@dataclass(frozen=True)
class LoadedModel:
    """As ``model.path`` has it: no checkpoint is loaded yet."""

    engine: DeepSpeedEngine
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
    return LoadedModel(DeepSpeedEngine(run.config, total_steps=num_steps), num_steps, certified)
