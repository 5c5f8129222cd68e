"""Runs ``DeepSpeedEngine`` checks in one or several processes and writes what they measured.

Started plainly or by the ``deepspeed`` launcher with a folder that ``engine_cases.prepare`` filled,
and the word ``slow`` for all cases. Each rank leaves ``results-rank*.json`` there: by case,
numbers, or the traceback of a check that raised. ``test_deepspeed_engine.py`` says what they have
to be.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import load_file
from torch import Tensor

from easyrl.config import Config, ModelConfig, RecipeConfig
from easyrl.config.file import validate_config
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.engines import weight_names
from easyrl.engines.base import NonFiniteLossError
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.engines.process_group import start_process_group
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.models.loading import load_policy_model
from easyrl.models.policy_model import PolicyModel
from easyrl.models.tri_model import TriModel, frozen_model
from easyrl.recipes.loading import load_recipe
from easyrl.recipes.losses import policy_loss
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.schema import MicroBatch
from tests.easyrl.engines.engine_cases import (
    AGGREGATIONS,
    CLIP,
    ENTROPY_COEF,
    KL_COEF,
    MAX_GRAD_NORM,
    MAX_TOKENS,
    TEMPERATURE,
    Gold,
    denominator,
    dense_gold,
    relative_error,
    streamed,
)
from tests.easyrl.engines.update_cases import (
    OPTIMIZER,
    Update,
    denominator_of,
    dense_updates,
    rows_of,
    slices,
)

# AdamW's first step with an eps far above every gradient is ``-lr / eps * gradient``: the clipped
# gradient can be read off the weights, which are so small against the step that rounding is too.
SGD_SCALE = 1000.0
SGD = {"adam_eps": 1e9, "learning_rate": 1e9 * SGD_SCALE}
ADAM = {"learning_rate": 1e-2, "lr_schedule": "cosine", "warmup_steps": 2, "max_steps": 8}
STAGES = (0, 1, 2, 3)
OFFLOAD = {"offload_optimizer": True, "offload_reference": True}
# stage and dtype of the behaviour checks in a quick run, by number of ranks
QUICK = {1: ((0, "fp32"), (1, "bf16")), 2: ((2, "fp32"), (3, "fp32"))}
Weights = dict[str, Tensor]
Results = dict[str, Any]


class Session:
    """The processes of this run, and engines in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        start_process_group()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def config(self, stage: int, dtype: str, trainer: Results, model: str = "policy") -> Config:
        return validate_config(
            {
                "model": {"path": str(self.folder / model), "dtype": dtype},
                "data": {"files": [str(self.folder / "prompts.jsonl")]},
                "inference": {"endpoints": ["http://127.0.0.1:1"]},
                "rewards": [{"name": "exact"}],
                "rollout": {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS},
                "recipe": {
                    "aggregation": "token",
                    "kl_coef": KL_COEF,
                    "entropy_coef": ENTROPY_COEF,
                    "clip_eps_low": CLIP,
                    "clip_eps_high": CLIP,
                },
                "trainer": {
                    "zero_stage": stage,
                    "max_grad_norm": MAX_GRAD_NORM,
                    "old_policy": "auto" if "updates_per_batch" in trainer else "lagged",
                }
                | trainer,
            }
        )

    def models(self, dtype: str = "fp32", checkpointing: bool = False) -> Callable[[], PolicyModel]:
        """Loads policy, reference and old policy, in the order in which an engine asks."""
        names = iter(("policy", "reference", "old"))
        return lambda: load_policy_model(
            ModelConfig(
                path=self.folder / next(names),
                dtype=dtype,
                activation_checkpointing="selective" if checkpointing else "none",
                attention="merged",  # auto takes the reference for rows as short as these
            )
        )

    def engine(
        self,
        stage: int,
        dtype: str = "fp32",
        checkpointing: bool = False,
        logprob_backward: str = "auto",
        **trainer: Any,
    ) -> DeepSpeedEngine:
        config = self.config(stage, dtype, trainer)
        model = config.model.model_copy(update={"logprob_backward": logprob_backward})
        config = config.model_copy(update={"model": model})
        return DeepSpeedEngine(config, load_model=self.models(dtype, checkpointing))

    def share(self, rows: Sequence[MicroBatch], *, equal: bool, first: int = 1) -> list[MicroBatch]:
        """Rank 0 gets the ``first`` rows, the last rank the others; ``equal`` pads with dummies."""
        if self.size == 1:
            return list(rows)
        mine = list(rows[:first] if self.rank == 0 else rows[first:])
        if equal:
            longest = max(first, len(rows) - first)
            mine += [dummy_micro_batch() for _ in range(longest - len(mine))]
        return mine

    def train(self, engine: DeepSpeedEngine, seed: int = 0, first: int = 1) -> float:
        """One batch; the gradient norm."""
        rows = self.share(streamed("token", seed=seed), equal=engine.lockstep, first=first)
        for row in rows:
            engine.forward_backward([row])
        result = engine.optimizer_step(denominator("token"))
        assert not result.skipped
        return result.grad_norm


def weights_of(engine: DeepSpeedEngine) -> Weights:
    """Rank 0: all weights; other ranks: nothing."""
    weights = {name: tensor.clone() for name, tensor in engine.named_weights()}
    return weights if engine.ranks.rank == 0 else {}


def same_bits(one: Weights, two: Weights) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def num_changed(one: Weights, two: Weights) -> int:
    return sum(not torch.equal(one[name], two[name]) for name in one)


# ---- gradients ---------------------------------------------------------------------------------


def check_gradient(
    session: Session, stage: int, aggregation: str, gold: Gold, first: int = 1, **settings: Any
) -> Results:
    """One SGD-like step of the streamed batch against the dense gradient of the whole."""
    engine = session.engine(stage, **settings, **SGD)
    before = weights_of(engine)
    rows = streamed(aggregation)
    probe = rows[0]
    policy_before = engine.logprobs(probe)
    metrics = []
    for row in session.share(rows, equal=engine.lockstep, first=first):
        metrics += engine.forward_backward([row])
    result = engine.optimizer_step(denominator(aggregation))
    after = weights_of(engine)
    old = engine._tri_model.old_policy
    (lagged,) = old.logprobs([(probe, SegmentLayout(probe.segments))], TEMPERATURE)
    return {
        "gradient": relative_error(
            {n: (before[n].double() - after[n].double()) / SGD_SCALE for n in before},
            {n: gold.gradients[n] for n in before},
        ),
        "norm": abs(result.grad_norm - gold.grad_norm) / gold.grad_norm,
        "clipped": gold.grad_norm > MAX_GRAD_NORM,
        "skipped": result.skipped,
        "lagged_is_the_policy_before": float((lagged - policy_before).abs().max()),
        "policy_moved": float((engine.logprobs(probe) - policy_before).abs().max()),
        "tokens_clipped": sum(
            m.sums.get("clip_low_sum", 0) + m.sums.get("clip_high_sum", 0) for m in metrics
        ),
    }


def check_together(session: Session, stage: int, dtype: str = "fp32", **settings: Any) -> Results:
    """Two steps whose rows go to the engine together, on three threads, against one by one."""
    weights, sums, errors = [], [], []
    for together in (False, True):
        engine = session.engine(stage, dtype, **settings, **ADAM)
        made, seen = [], []
        for seed in (0, 1):
            rows = streamed("token", seed=seed)
            engine.forward_backward(rows[:1])
            torch.set_num_threads(3 if together else 1)
            calls = [rows[1:]] if together else [[row] for row in rows[1:]]
            made += [m.sums for call in calls for m in engine.forward_backward(call)]
            seen.append(torch.get_num_threads())
            torch.set_num_threads(1)
            assert not engine.optimizer_step(denominator("token")).skipped
        weights.append(weights_of(engine))
        sums.append(made)
        bad = replace(rows[2], advantages=torch.full_like(rows[2].advantages, torch.inf))
        torch.set_num_threads(3 if together else 1)
        with suppress(NonFiniteLossError):
            engine.forward_backward([rows[1], rows[3], bad])
            errors.append("none was raised")
        torch.set_num_threads(1)
        if not engine.optimizer_step(denominator("token")).skipped:
            errors.append("the step was taken")
    return {
        "threads": seen,
        "same_weights": same_bits(*weights),
        "same_sums": sums[0] == sums[1],
        "errors": errors,
        "pool": 0 if engine._row_threads is None else len(engine._row_threads._pool._threads),
    }


def bf16_gold(session: Session, accumulate: torch.dtype) -> Gold:
    """A bare bf16 model on the same rows; the rows' gradients summed in ``accumulate``."""
    load = session.models("bf16")
    policy, reference, old = load(), load(), load()
    device = torch.device("cpu")
    tri = TriModel(
        policy,
        reference=frozen_model(reference),
        old_policy=frozen_model(old),
        temperature=TEMPERATURE,
        device=device,
    )
    recipe = load_recipe(session.config(1, "bf16", {}))
    names = {name.removeprefix("model."): p for name, p in policy.named_parameters()}
    sums = {name: torch.zeros_like(p, dtype=accumulate) for name, p in names.items()}
    for row in streamed("token"):
        policy.zero_grad()
        policy_loss(tri(row), row, recipe)[0].backward()
        for name, p in names.items():
            assert p.grad is not None
            sums[name] += p.grad.to(accumulate)
    gradients = {name: s.double() / denominator("token") for name, s in sums.items()}
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    clip = min(1.0, MAX_GRAD_NORM / (norm + 1e-6))
    return Gold({name: g * clip for name, g in gradients.items()}, norm)


def check_bf16(session: Session, stage: int, gold: Gold, **settings: Any) -> Results:
    """The fp32 master weights after an SGD-like step against the fp32-accumulated gradient."""
    engine = session.engine(stage, "bf16", **settings, **SGD)
    names = {name: p for name, p in engine._policy.model.named_parameters()}
    before = {name: safe_get_full_fp32_param(p).double() for name, p in names.items()}
    norm = session.train(engine)
    after = {name: safe_get_full_fp32_param(p).double() for name, p in names.items()}
    got = {name: (before[name] - after[name]) / SGD_SCALE for name in names}
    return {
        "gradient": relative_error(got, gold.gradients),
        "norm": abs(norm - gold.grad_norm) / gold.grad_norm,
    }


# ---- several updates per batch -----------------------------------------------------------------


def check_updates(
    session: Session, stage: int, updates: Sequence[Update], dtype: str = "fp32"
) -> Results:
    """The updates of a batch against dense PPO's; then the next batch's old policy."""
    num_updates = len(updates)
    settings = {"updates_per_batch": num_updates, "max_steps": 2 * num_updates} | OPTIMIZER
    engine = session.engine(stage, dtype, **settings)
    old = engine._tri_model.old_policy
    forwards = 0

    def counted(*arguments: Any) -> Tensor:
        nonlocal forwards
        forwards += 1
        return plain(*arguments)

    plain, old.logprobs = old.logprobs, counted
    start = weights_of(engine)
    engine.begin_batch()
    differences = []  # of each update's tokens, by the weights that the whole batch is made by
    for groups in slices(num_updates):
        rows = session.share(rows_of(groups), equal=engine.lockstep)
        difference = 0.0
        for row in rows:  # all of them: a forward may be collective
            apart = (engine.logprobs(row) - row.inference_logprobs).abs()
            difference += 0.0 if row.is_dummy else float(apart.sum())
        differences.append(difference)
    measured: list[Results] = []
    for groups, expected, apart in zip(slices(num_updates), updates, differences, strict=True):
        before, metrics = forwards, []
        rows = session.share(rows_of(groups), equal=engine.lockstep)
        for row in rows:
            metrics += engine.forward_backward([row])
        result = engine.optimizer_step(denominator_of(groups))
        moved = {name: w.double() - start[name].double() for name, w in weights_of(engine).items()}
        clipped = ("clip_low_sum", "clip_high_sum")
        measured.append(
            {
                "moved": relative_error(moved, {name: expected.moved[name] for name in moved}),
                "norm": abs(result.grad_norm - expected.grad_norm) / expected.grad_norm,
                "clipped": sum(m.sums.get(name, 0) for m in metrics for name in clipped),
                "ratio_max": max(m.maxima.get("ratio_max", 1.0) for m in metrics),
                "old_forwards": forwards - before,
                "rows": len(rows),
                "learning_rate": result.learning_rate,
                "compared": (sum(c.abs for m in metrics for c in m.compared.values()), apart),
            }
        )
    engine.begin_batch()
    row = rows_of(slices(1)[0])[0]
    (of_old,) = plain([(row, SegmentLayout(row.segments))], TEMPERATURE)
    return {"updates": measured, "next_old": float((of_old - engine.logprobs(row)).abs().max())}


def check_update_skip(session: Session, stage: int) -> Results:
    """A first update that is skipped moves nothing: the old policy is still the policy."""
    engine = session.engine(stage, updates_per_batch=2, max_steps=2, **OPTIMIZER)
    engine.begin_batch()
    skipped, taken = slices(2)
    rows = [replace(row, advantages=row.advantages * torch.nan) for row in rows_of(skipped)]
    for row in session.share(rows, equal=engine.lockstep):
        with suppress(NonFiniteLossError):
            engine.forward_backward([row])
    first = engine.optimizer_step(denominator_of(skipped))
    metrics = []
    for row in session.share(rows_of(taken), equal=engine.lockstep):
        metrics += engine.forward_backward([row])
    second = engine.optimizer_step(denominator_of(taken))
    ratios = [m.maxima["ratio_max"] for m in metrics if m.maxima]
    return {"skipped": [first.skipped, second.skipped], "ratios": ratios}


# ---- behaviour ---------------------------------------------------------------------------------


def check_skip(session: Session, stage: int, dtype: str) -> Results:
    """A NaN on one rank: that rank raises, every rank skips, nothing has changed afterwards."""
    undisturbed, disturbed = (session.engine(stage, dtype, **ADAM) for _ in range(2))
    session.train(undisturbed)
    session.train(disturbed)
    before = weights_of(disturbed)
    rows = session.share(streamed("token", seed=1), equal=True, first=2)
    raised = 0
    for index, row in enumerate(rows):
        if index == 1 and session.rank == session.size - 1:
            row = replace(row, advantages=row.advantages * torch.nan)
        try:
            disturbed.forward_backward([row])
        except NonFiniteLossError:
            raised += 1
    result = disturbed.optimizer_step(denominator("token"))
    unchanged = same_bits(before, weights_of(disturbed))
    session.train(undisturbed, seed=2)
    session.train(disturbed, seed=2)
    return {
        "raised": raised if session.rank == session.size - 1 else -1,
        "skipped": result.skipped,
        "norm_is_finite": bool(torch.isfinite(torch.tensor(result.grad_norm))),
        "unchanged": unchanged,
        "goes_on_as_if_nothing_happened": same_bits(weights_of(undisturbed), weights_of(disturbed)),
        "next_learning_rates": [e._engine.get_lr()[0] for e in (undisturbed, disturbed)],
    }


def check_discard(session: Session, stage: int, dtype: str, **settings: Any) -> Results:
    """What was accumulated before ``discard_gradients`` leaves no trace."""
    undisturbed, disturbed = (session.engine(stage, dtype, **settings, **ADAM) for _ in range(2))
    for engine in (undisturbed, disturbed):
        session.train(engine)
    disturbed.forward_backward(session.share(streamed("token", seed=1), equal=True, first=2)[:2])
    disturbed.discard_gradients()
    norms = [session.train(engine, seed=2) for engine in (undisturbed, disturbed)]
    return {
        "same": same_bits(weights_of(undisturbed), weights_of(disturbed)),
        "norms": norms,
    }


def check_resume(session: Session, stage: int, dtype: str, **settings: Any) -> Results:
    """Saved after two steps and loaded into a new engine, the third step is the same to the bit."""
    special = "-".join(f"{key}-{value}" for key, value in settings.items())
    folder = session.folder / f"checkpoint-{stage}-{dtype}-{special}"
    collectives = Collectives(Ranks.data_parallel(session.rank, session.size))
    engine = session.engine(stage, dtype, **settings, **ADAM)
    for seed in (0, 1):
        session.train(engine, seed)
    Checkpoints(folder, 1, engine, collectives, background=False).save(2, {})
    saved = weights_of(engine)
    resumed = session.engine(stage, dtype, **settings, **ADAM)
    fresh = weights_of(resumed)
    Checkpoints(folder, 1, resumed, collectives, background=False).load_latest()
    loaded = weights_of(resumed)
    rates = [e._engine.get_lr()[0] for e in (engine, resumed)]
    norms = [session.train(e, seed=2) for e in (engine, resumed)]
    config = session.config(stage, dtype, {})
    auto = config.trainer.model_copy(update={"old_policy": "auto"})
    other = DeepSpeedEngine(config.model_copy(update={"trainer": auto}))
    try:
        Checkpoints(folder, 1, other, collectives, background=False).load_latest()
        message = ""
    except ValueError as error:
        message = str(error)
    return {
        "loading_changed": num_changed(fresh, loaded),
        "loaded": same_bits(saved, loaded),
        "continued": same_bits(weights_of(engine), weights_of(resumed)),
        "learning_rates": rates,
        "norms": norms,
        "refusal": message,
    }


def most_gathered(engine: DeepSpeedEngine) -> dict[str, int]:
    """Numbers that are whole on this rank at one time while the weights are streamed."""
    parameters = list(engine._policy.model.parameters())
    most = 0

    class Watched(weight_names.GatheredParameters):
        def __enter__(self):
            nonlocal most
            super().__enter__()
            whole = [p for p in parameters if p.ds_status == ZeroParamStatus.AVAILABLE]
            most = max(most, sum(p.ds_numel for p in whole))

    plain, weight_names.GatheredParameters = weight_names.GatheredParameters, Watched
    try:
        for _ in engine.named_weights():
            pass
    finally:
        weight_names.GatheredParameters = plain
    sizes = [p.ds_numel for p in parameters]
    return {"most": most, "model": sum(sizes), "largest": max(sizes)}


def check_names(session: Session, stage: int, model: str) -> Results:
    """``named_weights`` against the file that ``save_pretrained`` wrote, before any step."""
    config = session.config(stage, "fp32", {}, model=model)
    plain = {
        "recipe": RecipeConfig.model_validate({"kl_coef": 0.0}),
        "trainer": config.trainer.model_copy(update={"old_policy": "auto"}),
    }
    config = config.model_copy(update=plain)
    engine = DeepSpeedEngine(config)
    streamed_weights = weights_of(engine)
    expected = load_file(session.folder / model / "model.safetensors")
    return {
        "missing": sorted(expected.keys() - streamed_weights.keys()) if session.rank == 0 else [],
        "extra": sorted(streamed_weights.keys() - expected.keys()),
        "equal": session.rank != 0 or same_bits(expected, streamed_weights),
        "names_of_rank": [name for name, _ in engine.named_weights()],
        "shapes_of_rank": [list(tensor.shape) for _, tensor in engine.named_weights()],
        "devices": sorted({tensor.device.type for _, tensor in engine.named_weights()}),
        "gathered_share": most_gathered(engine) if stage == 3 else None,
        "frozen_models": [
            engine._tri_model.reference is not None,
            engine._tri_model.old_policy is not None,
        ],
    }


def check_perturbation(session: Session, stage: int, dtype: str) -> Results:
    """Inside every tensor differs, afterwards the weights and the next step are the same bits."""
    undisturbed, disturbed = (session.engine(stage, dtype, **ADAM) for _ in range(2))
    for engine in (undisturbed, disturbed):
        session.train(engine)
    probe = streamed("token")[0]
    before, logprobs = weights_of(disturbed), disturbed.logprobs(probe)
    with disturbed.perturbed_weights():
        inside = weights_of(disturbed)
        moved = float((disturbed.logprobs(probe) - logprobs).abs().mean())
    after = weights_of(disturbed)
    again = float((disturbed.logprobs(probe) - logprobs).abs().max())
    for engine in (undisturbed, disturbed):
        session.train(engine, seed=1)
    return {
        "unperturbed": len(before) - num_changed(before, inside),
        "logprobs_moved": moved,
        "restored": same_bits(before, after),
        "logprobs_restored": again,
        "next_step_same": same_bits(weights_of(undisturbed), weights_of(disturbed)),
    }


# ---- the list ----------------------------------------------------------------------------------


def cases(session: Session, slow: bool) -> dict[str, Callable[[], Results]]:
    """By name; every rank runs all of them in this order."""
    gold = {name: dense_gold(session.folder, name) for name in AGGREGATIONS}
    updates = {k: dense_updates(session.folder, k) for k in (2, 4)}
    low = bf16_gold(session, torch.float32)
    plain = bf16_gold(session, torch.bfloat16)
    listed: dict[str, Callable[[], Results]] = {}

    def add(name: str, check: Callable[..., Results], *args: Any, **settings: Any) -> None:
        listed[name] = lambda: check(session, *args, **settings)

    for stage in STAGES:
        dtypes = ("fp32", "bf16") if stage > 0 else ("fp32",)
        for name in AGGREGATIONS:
            add(f"gradient/{stage}/{name}", check_gradient, stage, name, gold[name])
        for k in updates if slow or session.size == 1 else (4,):
            add(f"updates/{stage}/{k}", check_updates, stage, updates[k])
        if slow or (session.size, stage) == (1, 3):
            add(f"update-skip/{stage}", check_update_skip, stage)
        if "bf16" in dtypes:
            add(f"bf16/{stage}", check_bf16, stage, low)
            if slow or (session.size, stage) == (1, 1):
                add(f"updates-bf16/{stage}", check_updates, stage, updates[2], "bf16")
        if session.size > 1 and stage < 2:
            add(
                f"rank-without-rows/{stage}", check_gradient, stage, "token", gold["token"], first=0
            )
        if session.size == 1:
            for dtype in dtypes:
                add(f"together/{stage}/{dtype}", check_together, stage, dtype)
            add(f"together/{stage}/checkpointing", check_together, stage, checkpointing=True)
        if slow or stage in (1, 3):
            for model in ("policy", "moe"):
                add(f"names/{stage}/{model}", check_names, stage, model)
        for dtype in dtypes:
            if slow or (stage, dtype) in QUICK[session.size]:
                add(f"discard/{stage}/{dtype}", check_discard, stage, dtype)
                add(f"skip/{stage}/{dtype}", check_skip, stage, dtype)
                add(f"perturbation/{stage}/{dtype}", check_perturbation, stage, dtype)
                add(f"resume/{stage}/{dtype}", check_resume, stage, dtype)
        if slow or stage == 2:
            gradient = (check_gradient, stage, "token", gold["token"])
            add(f"checkpointing/{stage}", *gradient, checkpointing=True)
            add(f"recompute/{stage}", *gradient, logprob_backward="recompute")
            if stage > 0:
                add(f"offload/{stage}/fp32", *gradient, **OFFLOAD)
        if slow and stage > 0:
            add(f"offload-bf16/{stage}", check_bf16, stage, low, **OFFLOAD)
            add(f"discard/{stage}/offload", check_discard, stage, "fp32", **OFFLOAD)
            add(f"resume/{stage}/offload", check_resume, stage, "fp32", **OFFLOAD)
    listed["bf16-accumulation"] = lambda: {
        "gradient": relative_error(plain.gradients, low.gradients)
    }
    return listed


def run(folder: Path, slow: bool) -> None:
    session = Session(folder)
    results: dict[str, Results] = {}
    for name, check in cases(session, slow).items():
        # DeepSpeed collects garbage for its memory statistics and keeps old engines alive
        gc.freeze()
        started = time.monotonic()
        print(f"rank {session.rank}: {name}", flush=True)  # says where a launch that hung was
        try:
            results[name] = check()
        except Exception:  # the other cases still tell something
            results[name] = {"error": traceback.format_exc()}
            if session.size > 1:  # the other ranks wait in a collective; the launcher ends them
                raise
        results[name]["seconds"] = time.monotonic() - started
    (folder / f"results-rank{session.rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    run(Path(arguments[0]), slow="slow" in arguments[1:])
