"""Distils with ``DeepSpeedEngine`` in one or several processes; see test_teacher_engine.py.

``python teacher_worker.py FOLDER``, or under the launcher, with a folder that
``teacher_cases.prepare`` filled. Each rank leaves ``results-rank*.json`` there.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

from easyrl.config import Config, RecipeConfig
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from tests.easyrl.engines.engine_cases import MAX_GRAD_NORM, relative_error
from tests.easyrl.engines.engine_worker import SGD, SGD_SCALE, STAGES, Session, weights_of
from tests.easyrl.models.teacher_cases import denominator_of, dense_gold, recipe_of, rows_of

Results = dict[str, Any]
WAYS = (("sampled", "larger"), ("full", "larger"), ("full", "smaller"))


class TeacherSession(Session):
    """Engines of a policy with a frozen teacher."""

    way = ("sampled", "larger")

    def config(self, stage: int, dtype: str, trainer: Results, model: str = "policy") -> Config:
        config = super().config(stage, dtype, {"old_policy": "auto"} | trainer, model)
        divergence, teacher = self.way
        recipe = RecipeConfig.model_validate(
            {
                "name": "distillation",
                "teacher": str(self.folder / teacher),
                "divergence": divergence,
            }
        )
        return config.model_copy(update={"recipe": recipe})

    def teacher_engine(self, stage: int, dtype: str = "fp32", **trainer: Any) -> DeepSpeedEngine:
        return DeepSpeedEngine(self.config(stage, dtype, trainer))


def check_gradient(session: TeacherSession, stage: int, dtype: str = "fp32") -> Results:
    """One SGD-like step of the streamed batch against the dense gradient of the whole."""
    divergence, teacher = session.way
    recipe = recipe_of(session.folder, teacher, divergence)
    gold, mean = dense_gold(session.folder, teacher, divergence, MAX_GRAD_NORM)
    engine = session.teacher_engine(stage, dtype, **SGD)
    before, keys = weights_of(engine), {piece.key for piece in engine.snapshot().pieces}
    frozen = engine._tri_model.teacher.module  # type: ignore[union-attr]
    kl = 0.0
    for row in session.share(rows_of(recipe), equal=engine.lockstep):
        kl += sum(m.sums.get("teacher_kl_sum", 0.0) for m in engine.forward_backward([row]))
    result = engine.optimizer_step(denominator_of(recipe))
    after = weights_of(engine)
    return {
        "gradient": relative_error(
            {n: (before[n].double() - after[n].double()) / SGD_SCALE for n in before},
            {n: gold.gradients[n] for n in before},
        ),
        "norm": abs(result.grad_norm - gold.grad_norm) / gold.grad_norm,
        "skipped": result.skipped,
        "kl": kl / denominator_of(recipe),  # of this rank's rows
        "expected_kl": mean,
        "looks_ahead": engine.can_look_ahead,
        "has_frozen": engine.has_frozen_models,
        "of_policy": all(key.split("/")[-1] in _names(engine) for key in keys),
        "teacher_is_frozen": all(not p.requires_grad for p in frozen.parameters()),
    }


def _names(engine: DeepSpeedEngine) -> set[str]:
    return set(engine._parameters())


def main() -> None:
    logging.disable(logging.WARNING)
    session = TeacherSession(Path(sys.argv[-1]))  # behind the launcher's own
    results: dict[str, Results] = {}
    cases = [(stage, "fp32", way) for stage in STAGES for way in WAYS]
    cases += [(3, "bf16", ("full", "larger")), (2, "bf16", ("full", "smaller"))]
    for stage, dtype, way in cases:
        session.way = way
        try:
            found = check_gradient(session, stage, dtype)
        except Exception:
            found = {"error": traceback.format_exc()}
        results[f"{stage}/{dtype}/{'/'.join(way)}"] = found
        gc.collect()
    (session.folder / f"results-rank{session.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
