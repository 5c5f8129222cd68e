"""Trains PPO on real engines in one or two processes and writes what was measured.

``python critic_worker.py FOLDER``, plainly or under the launcher; ``test_critic_engine.py`` says
what the numbers have to be. Two ranks leave a checkpoint that one rank loads.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from blake3 import blake3
from safetensors.torch import load_file
from torch import Tensor, nn

from easyrl.build.recipe import group_functions
from easyrl.config import Config, ConfigError, ModelConfig
from easyrl.config.file import validate_config
from easyrl.engines.base import MetricSums, StepResult
from easyrl.engines.deepspeed import critic as critic_module
from easyrl.engines.deepspeed import engine as engine_module
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.engines.deepspeed.late_denominator import step_divided
from easyrl.engines.process_group import start_process_group
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.metrics.batch_metrics import BatchTotals
from easyrl.metrics.critic_metrics import critic_metrics
from easyrl.models.critic import load_critic_model
from easyrl.models.loading import load_policy_model
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import MicroBatch, RolloutGroup
from easyrl.trainer.accumulation import Accumulator
from tests.easyrl.engines.critic_cases import (
    KL_COEF,
    LORA,
    STAGES,
    TARGETS,
    Dense,
    dense_gold,
    shares,
)
from tests.easyrl.engines.engine_cases import (
    MAX_GRAD_NORM,
    MAX_TOKENS,
    TEMPERATURE,
    make_groups,
    relative_error,
)
from tests.easyrl.engines.test_late_denominator_properties import Arrivals

# An eps far above every gradient: the first step is the clipped gradient, scaled (engine_worker.py)
SGD_SCALE = 1000.0
SGD = {"adam_eps": 1e9, "learning_rate": 1e9 * SGD_SCALE}
ADAM = {"learning_rate": 1e-2, "lr_schedule": "linear", "max_steps": 8}
CASES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16")]
Results = dict[str, Any]
Weights = dict[str, Tensor]
Mend = Callable[[], object]  # undoes what was broken


class Session:
    """The processes of this run, and engines in them.

    Attributes:
        problems: with this rank's losses, so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        start_process_group()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.collectives = Collectives(Ranks.data_parallel(self.rank, self.size))
        self.stop = StopRequest(60.0)
        self.problems: list[str] = []

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def config(
        self, stage: int, dtype: str, recipe: Results, trainer: Results, lora: bool = False
    ) -> Config:
        adapters = {"lora": LORA | {"target_modules": TARGETS}} if lora else {}
        rate = trainer.get("learning_rate", 1e-2)
        return validate_config(
            {
                "model": {"path": str(self.folder / "policy"), "dtype": dtype} | adapters,
                "data": {"files": [str(self.folder / "prompts.jsonl")]},
                "inference": {"endpoints": ["http://127.0.0.1:1"]},
                "rewards": [{"name": "exact"}],
                "rollout": {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS},
                "recipe": {"name": "ppo"} | recipe,
                "critic": {
                    "path": str(self.folder / "critic"),
                    "learning_rate": rate,
                    "max_grad_norm": MAX_GRAD_NORM,
                },
                "trainer": {
                    "zero_stage": stage,
                    "max_grad_norm": MAX_GRAD_NORM,
                    "max_tokens_per_micro_batch": 40,
                }
                | trainer,
            }
        )

    def engine(self, config: Config) -> DeepSpeedEngine:
        """Adapters have the values that ``prepare`` gave them: with ``B`` zero ``A`` has no
        gradient.
        """
        if config.model.lora is None:
            return DeepSpeedEngine(config)

        def load(make: Callable[..., nn.Module], model: ModelConfig, **options: Any) -> Any:
            values = load_file(
                self.folder / f"{model.path.name}_adapter" / "adapter_model.safetensors"
            )
            loaded = make(model, **options)
            adapter = {n: p for n, p in loaded.named_parameters() if ".lora_" in n}
            assert len(adapter) == len(values)
            with torch.no_grad():
                for name, parameter in adapter.items():
                    saved = name.replace(".default.", ".")
                    parameter.copy_(values[f"base_model.{saved}"])
            return loaded

        load_policy = partial(load, load_policy_model, config.model, seed=config.run.seed)
        load_critic = partial(load, load_critic_model)
        with mock.patch.object(critic_module, "load_critic_model", load_critic):
            return DeepSpeedEngine(config, load_model=load_policy)

    def note(self, event: str, **fields: Any) -> None:
        if event == "non_finite_loss":
            self.problems.append(fields["problem"])

    def accumulate(
        self, engine: DeepSpeedEngine, config: Config, drains: Sequence[list[RolloutGroup]]
    ) -> BatchTotals:
        """Of all ranks."""
        accumulator = Accumulator(
            engine=engine,
            collectives=self.collectives,
            functions=group_functions(config),
            stop=self.stop,
            is_interruption=lambda error: False,
            record=self.note,
            max_tokens=40,
            synchronous=False,
        )
        arrivals = Arrivals(list(drains))
        return accumulator.accumulate(cast(Any, arrivals)).merge(self.collectives)

    def train(self, engine: DeepSpeedEngine, config: Config) -> tuple[StepResult, BatchTotals]:
        """One batch of one update."""
        engine.begin_batch()
        totals = self.accumulate(engine, config, shares(self.size)[self.rank])
        result = engine.optimizer_step(totals.denominator, totals.value_denominator)
        assert result.critic is not None and result.critic.skipped == result.skipped
        return result, totals


def weights_of(engine: DeepSpeedEngine, kind: str = "full") -> Weights:
    """Rank 0: all weights; other ranks: nothing."""
    weights = {n: t.clone() for n, t in engine.named_weights(cast(Any, kind))}
    return weights if engine.ranks.rank == 0 else {}


def trained_of(engine: DeepSpeedEngine) -> tuple[Weights, Weights]:
    """Rank 0: what is trained of policy and critic, by ``DenseModel``'s names."""
    if engine._config.model.lora is None:
        return weights_of(engine), weights_of(engine, "critic")
    assert engine._critic is not None and engine._stage < 3
    if engine.ranks.rank > 0:
        return {}, {}
    policy, critic = (
        {n: p.detach().clone() for n, p in model.model.named_parameters() if p.requires_grad}
        for model in (engine._policy, engine._critic._model)
    )
    return policy, {"score.weight": critic.pop("lm_head.weight")} | critic


def state_of(engine: DeepSpeedEngine) -> str:
    """A hash of this rank's whole state: masters, moments, counts, schedules, of both models."""
    state, made = engine.snapshot(), blake3()
    for piece in sorted(state.pieces, key=lambda p: (p.key, p.start)):
        made.update(f"{piece.key} {piece.start}".encode())
        made.update(piece.values.contiguous().view(torch.uint8).numpy().tobytes())
    made.update(json.dumps(state.description, sort_keys=True, default=str).encode())
    return made.hexdigest()


def weights_hash(engine: DeepSpeedEngine) -> str:
    made = blake3()
    for kind in ("full", "critic"):
        for name, tensor in sorted(weights_of(engine, kind).items()):
            made.update(name.encode())
            made.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def check_gradient(
    session: Session,
    stage: int,
    gold: Dense,
    recipe: Results,
    *,
    lora: bool = False,
    **trainer: Any,
) -> Results:
    """One SGD-like step of the streamed batch against the dense gradients of the whole."""
    config = session.config(stage, "fp32", recipe, SGD | trainer, lora)
    engine = session.engine(config)
    before, saved = trained_of(engine), weights_of(engine, "critic")
    result, totals = session.train(engine, config)
    assert result.critic is not None
    after, now = trained_of(engine), weights_of(engine, "critic")
    moved = [
        {n: (one[n].double() - two[n].double()) / SGD_SCALE for n in one}
        for one, two in zip(before, after, strict=True)
    ]
    metrics = critic_metrics(totals.metrics.sums, totals.value_denominator, result)
    golds = gold.policy, gold.critic
    return {
        "gradients": [
            relative_error(m, {n: g.gradients[n] for n in m})
            for m, g in zip(moved, golds, strict=True)
        ],
        "norms": [
            abs(norm / g.grad_norm - 1)
            for norm, g in zip((result.grad_norm, result.critic.grad_norm), golds, strict=True)
        ],
        "clipped": [g.grad_norm > MAX_GRAD_NORM for g in golds],
        "skipped": result.skipped,
        "critic_names": sorted(now),
        "critic_unchanged": sorted(name for name in now if torch.equal(now[name], saved[name])),
        "explained_variance": [metrics["critic/explained_variance"], gold.explained_variance],
    }


def break_rows(
    session: Session, change: Callable[[MicroBatch], MicroBatch], engine: DeepSpeedEngine
) -> Mend:
    """Has the last rank's rows changed before they are trained."""
    plain = engine.forward_backward

    def forward_backward(rows: Sequence[MicroBatch]) -> list[MetricSums]:
        return plain([change(r) if session.is_last and not r.is_dummy else r for r in rows])

    engine.forward_backward = forward_backward  # type: ignore[method-assign]
    return lambda: setattr(engine, "forward_backward", plain)


def break_gradient(session: Session, model: str, engine: DeepSpeedEngine) -> Mend:
    """Finite losses, and a gradient of ``model`` that on the last rank is not."""
    assert engine._critic is not None
    broken = {"policy": engine._policy, "critic": engine._critic._model}[model]
    factor = math.nan if session.is_last else 1.0
    return next(iter(broken.parameters())).register_hook(lambda g: g * factor).remove


def check_skip(session: Session, stage: int, dtype: str) -> Results:
    """What is not finite in one model leaves both as they were, to the bit; so does a discard."""
    config = session.config(stage, dtype, {"whiten": False}, ADAM)

    def worthless(row: MicroBatch) -> MicroBatch:
        return replace(row, returns=cast(Tensor, row.returns) * math.nan)

    def aimless(row: MicroBatch) -> MicroBatch:
        return replace(row, advantages=row.advantages * math.nan)

    changes: dict[str, Callable[[DeepSpeedEngine], Mend] | None] = {
        "returns": partial(break_rows, session, worthless),
        "advantages": partial(break_rows, session, aimless),
        "policy's gradient": partial(break_gradient, session, "policy"),
        "critic's gradient": partial(break_gradient, session, "critic"),
        "discard": None,
    }
    found: Results = {}
    undisturbed = DeepSpeedEngine(config)
    for _ in range(2):
        session.train(undisturbed, config)
    for name, change in changes.items():
        gc.freeze()
        engine = DeepSpeedEngine(config)
        session.train(engine, config)
        before = state_of(engine), weights_hash(engine)
        session.problems.clear()
        if change is None:
            engine.begin_batch()
            session.accumulate(engine, config, shares(session.size)[session.rank])
            engine.discard_gradients()
            skipped = True
        else:
            mend = change(engine)
            skipped = session.train(engine, config)[0].skipped
            mend()
        found[name] = {
            "skipped": skipped,
            "finite_losses": not session.problems,
            "unchanged": before == (state_of(engine), weights_hash(engine)),
        }
        session.train(engine, config)
        found[name]["goes_on"] = weights_hash(engine) == weights_hash(undisturbed)
    return found


def check_control(session: Session) -> Results:
    """Two steps that do not wait for each other: the policy takes its own, the critic cannot."""

    def apart(policy: Any, divisor: float, step: Any, discard: Any) -> Any:
        return step_divided(policy, divisor), step()

    config = session.config(2, "fp32", {"whiten": False}, ADAM)
    engine = DeepSpeedEngine(config)
    session.train(engine, config)
    before = weights_of(engine)
    engine.begin_batch()
    break_gradient(session, "critic", engine)
    totals = session.accumulate(engine, config, shares(session.size)[session.rank])
    with mock.patch.object(engine_module, "step_together", apart):
        result = engine.optimizer_step(totals.denominator, totals.value_denominator)
    assert result.critic is not None
    after = weights_of(engine)
    moved = any(not torch.equal(before[name], after[name]) for name in before)
    return {"skipped": [result.skipped, result.critic.skipped], "moved": moved}


def check_updates(session: Session, stage: int, *, lora: bool = False) -> Results:
    """Two updates of a batch: values are of the critic as it was before the first."""
    trainer = ADAM | {"updates_per_batch": 2, "batch_size": 4}
    config = session.config(stage, "fp32", {}, trainer, lora)
    functions, groups = group_functions(config), make_groups()
    engine = session.engine(config)
    (probe, *_) = functions.pack_finished(groups[:1])
    told = []
    for _ in range(2):
        engine.begin_batch()
        for part in (groups[:2], groups[2:]):
            frozen = engine.frozen_logprobs(probe)
            live = engine._critic._model if engine._critic else None
            assert live is not None and frozen.values is not None
            totals = session.accumulate(engine, config, [part[session.rank :: session.size]])
            told.append(frozen.values.tolist())
            result = engine.optimizer_step(totals.denominator, totals.value_denominator)
            assert not result.skipped
    clip = totals.metrics.sums["critic/of_recipe/clip_fraction"]
    return {"values": told, "clip_fraction": clip / totals.metrics.sums["critic/num"]}


def check_resume(session: Session, stage: int, dtype: str, *, lora: bool = False) -> Results:
    """Saved after two steps and loaded into a new engine, the third is the same to the bit."""
    config = session.config(stage, dtype, {}, ADAM, lora)
    engine, resumed = DeepSpeedEngine(config), DeepSpeedEngine(config)
    for _ in range(2):
        session.train(engine, config)
    name = f"checkpoint-{stage}-{dtype}-lora" if lora else f"checkpoint-{stage}-{dtype}"
    folder = session.folder / f"{name}-{session.size}"
    Checkpoints(folder, 1, engine, session.collectives, background=False).save(2, {})
    fresh = weights_hash(resumed)
    Checkpoints(folder, 1, resumed, session.collectives, background=False).load_latest()
    loaded = state_of(resumed) == state_of(engine) and weights_hash(resumed) == weights_hash(engine)
    results = [session.train(each, config)[0] for each in (engine, resumed)]
    found = {
        "loading_changed": fresh != weights_hash(engine) or session.rank > 0,
        "loaded": loaded,
        "continued": state_of(engine) == state_of(resumed),
        "same_results": results[0] == results[1],
        "saved_weights": "",
    }
    if session.size == 1 and dtype == "fp32":  # what two ranks have left
        other = DeepSpeedEngine(config)
        path = session.folder / f"{name}-2"
        loaded_state = Checkpoints(path, 1, other, session.collectives, False).load_latest()
        assert loaded_state is not None
        found["of_two_ranks"] = weights_hash(other)
    else:
        again = DeepSpeedEngine(config)
        Checkpoints(folder, 1, again, session.collectives, background=False).load_latest()
        found["saved_weights"] = weights_hash(again)
    return found


def check_refusals(session: Session) -> Results:
    """A checkpoint of PPO for another recipe, and what sharded frozen models cannot tell."""
    said = []
    config = session.config(2, "fp32", {}, ADAM)
    plain = session.config(2, "fp32", {"name": "grpo", "kl_coef": 0.0}, ADAM)
    folder = session.folder / f"refused-{session.size}"
    checkpoints = Checkpoints(folder, 1, DeepSpeedEngine(config), session.collectives, False)
    checkpoints.save(1, {})
    try:
        Checkpoints(folder, 1, DeepSpeedEngine(plain), session.collectives, False).load_latest()
    except ValueError as error:
        said.append(str(error))
    try:
        DeepSpeedEngine(session.config(3, "fp32", {"kl_in_reward_coef": KL_COEF}, ADAM))
    except ConfigError as error:
        said.append(str(error))
    return {"said": said}


def cases(session: Session) -> dict[str, Callable[[], Results]]:
    """By name; every rank runs all of them in this order."""
    golds = {w: dense_gold(session.folder, whiten=w, with_kl=False) for w in (True, False)}
    with_kl = dense_gold(session.folder, whiten=True, with_kl=True)
    of_adapters = dense_gold(session.folder, whiten=True, with_kl=True, lora=True)
    listed: dict[str, Callable[[], Results]] = {}

    def add(name: str, check: Callable[..., Results], *args: Any, **settings: Any) -> None:
        listed[name] = lambda: check(session, *args, **settings)

    for stage in STAGES:
        for whiten, gold in golds.items():
            add(f"gradient/{stage}/{whiten}", check_gradient, stage, gold, {"whiten": whiten})
        if stage < 3:
            recipe = {"kl_in_reward_coef": KL_COEF}
            add(f"gradient/{stage}/kl", check_gradient, stage, with_kl, recipe)
        add(f"updates/{stage}", check_updates, stage)
    add("gradient/2/offload", check_gradient, 2, with_kl, {"kl_in_reward_coef": KL_COEF},
        offload_reference=True, offload_optimizer=True)  # fmt: skip
    add(
        "gradient/2/lora", check_gradient, 2, of_adapters, {"kl_in_reward_coef": KL_COEF}, lora=True
    )
    add("updates/2/lora", check_updates, 2, lora=True)
    add("resume/2/lora", check_resume, 2, "fp32", lora=True)
    for stage, dtype in CASES:
        add(f"skip/{stage}/{dtype}", check_skip, stage, dtype)
        add(f"resume/{stage}/{dtype}", check_resume, stage, dtype)
    add("control", check_control)
    add("refusals", check_refusals)
    return listed


def run(folder: Path) -> None:
    session = Session(folder)
    results: dict[str, Results] = {}
    for name, check in cases(session).items():
        gc.freeze()
        print(f"rank {session.rank}: {name}", flush=True)
        try:
            results[name] = check()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            if session.size > 1:
                raise
    session.stop.close()
    (folder / f"critic-{session.size}-rank{session.rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    run(Path([a for a in sys.argv[1:] if not a.startswith("--local_rank")][0]))
