"""Steps engines with each ``trainer.optimizer``, alone or on two ranks; see test_optimizers.py.

Started plainly or by the ``deepspeed`` launcher with a folder that ``optimizer_cases.prepare``
filled. Each rank leaves ``results-rank*.json``: by case, what was measured.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from easyrl.config import LoraConfig
from easyrl.engines.deepspeed import engine as engine_module
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.engines.deepspeed.late_denominator import step_divided
from easyrl.engines.deepspeed.muon import MuonWithAdamW
from easyrl.engines.deepspeed.shards import shards_of
from easyrl.engines.deepspeed.state import copy_of
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from tests.easyrl.engines.engine_cases import MAX_GRAD_NORM, relative_error
from tests.easyrl.engines.engine_worker import (
    ADAM,
    Results,
    Session,
    check_discard,
    check_resume,
    same_bits,
)
from tests.easyrl.engines.optimizer_cases import (
    NUM_STEPS,
    SETTINGS,
    STAGES,
    FlatAdamW8bit,
    Layout,
    Optimizers,
    Step,
    dense_steps,
    exact_newton_schulz,
    installed,
    plain_adamw,
    plain_muon,
)
from tests.easyrl.engines.update_cases import denominator_of, rows_of, slices

AVERAGES = ("exp_avg", "momentum_buffer")
UPDATES = {"updates_per_batch": NUM_STEPS, "max_steps": 2 * NUM_STEPS, "lr_schedule": "linear"}


def saved_state(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """What all ranks' shares of a checkpoint make, by key, on every rank."""
    shares: list[Any] = [None] * dist.get_world_size()
    pieces = [(piece.key, piece.start, piece.values) for piece in engine.snapshot().pieces]
    dist.all_gather_object(shares, pieces)
    by_key: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for share in shares:
        for key, start, values in share:
            by_key[key].append((start, values))
    return {
        key: torch.cat([v for _, v in sorted(parts, key=lambda part: part[0])])
        for key, parts in by_key.items()
    }


def of_kind(state: Mapping[str, Tensor], *kinds: str) -> dict[str, Tensor]:
    parts = {key: key.partition("/") for key in state}
    return {parts[key][2]: value for key, value in state.items() if parts[key][0] in kinds}


def layout_of(engine: DeepSpeedEngine) -> Layout:
    """The flat tensors of all ranks; of one where all hold the same."""
    shards = shards_of(engine._engine.optimizer, engine._parameters(), engine.ranks)
    mine = [(shard.tensor.numel(), shard.fragments) for shard in shards if shard.fragments]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered[0] if engine._stage == 0 else sum(gathered, [])


def exact_muon() -> AbstractContextManager[object]:
    return mock.patch("torch.optim._muon._zeropower_via_newtonschulz", exact_newton_schulz)


def reference(session: Session, name: str, layout: Layout, max_grad_norm: float) -> list[Step]:
    plain: dict[str, Callable[..., Optimizers]] = {"adamw": plain_adamw, "muon": plain_muon}
    make = plain.get(name) or (lambda policy: [FlatAdamW8bit(policy, layout)])
    with exact_muon():
        return dense_steps(session.folder, max_grad_norm, make)


def check_exact_steps(*arguments: Any) -> Results:
    with exact_muon():
        return check_steps(*arguments)


def check_steps(
    session: Session, name: str, stage: int, max_grad_norm: float, expected: Sequence[Step] | None
) -> Results:
    """Streamed rows of unequal batches against the plain optimizer on each batch's mean loss."""
    settings = SETTINGS[name] | UPDATES | {"max_grad_norm": max_grad_norm}
    engine = session.engine(stage, **settings)
    expected = expected or reference(session, name, layout_of(engine), max_grad_norm)
    start = of_kind(saved_state(engine), "master")
    engine.begin_batch()
    measured = []
    for groups, gold in zip(slices(NUM_STEPS), expected, strict=True):
        rows = session.share(rows_of(groups), equal=engine.lockstep)
        for row in rows:
            engine.forward_backward([row])
        result = engine.optimizer_step(denominator_of(groups))
        state = saved_state(engine)
        moved = {n: v.double() - start[n] for n, v in of_kind(state, "master").items()}
        flat = {n: v.view(-1) for n, v in gold.averages.items()}
        averages = of_kind(state, *AVERAGES)
        measured.append(
            {
                "norm": abs(result.grad_norm - gold.grad_norm) / gold.grad_norm,
                "moved": relative_error(moved, {n: gold.moved[n].view(-1) for n in moved}),
                "averages": relative_error(averages, flat),
                "num_averages": len(averages),
                "clipped": 0 < max_grad_norm < gold.grad_norm,
                "rows": len(rows),
                "rates": engine._engine.get_lr(),
            }
        )
    inner = engine._engine.optimizer.optimizer
    split = [m.is_split for m in sum(inner._layouts.values(), [])] if name == "muon" else []
    return {"steps": measured, "num_split": sum(split), "type": type(inner).__name__}


def check_undivided(session: Session, name: str, stage: int, expected: Any) -> Results:
    """The same comparison where the denominator is left out."""

    def undivided(engine: Any, divisor: float) -> tuple[float, bool]:
        return step_divided(engine, 1.0)

    with mock.patch.object(engine_module, "step_divided", undivided):
        return check_steps(session, name, stage, 0.0, expected)


def check_bf16(session: Session, name: str, stage: int) -> Results:
    """The fp32 masters after a step, by the plain optimizer from those before it and the clipped
    gradient; which is that of AdamW's running mean at the same weights.
    """
    with exact_muon():
        return check_masters(session, name, stage)


def check_masters(session: Session, name: str, stage: int) -> Results:
    trained = []
    for each in ("adamw", name):
        engine = session.engine(stage, "bf16", **SETTINGS[each] | UPDATES)
        before = of_kind(saved_state(engine), "master")
        engine.begin_batch()
        (groups,) = slices(1)
        for row in session.share(rows_of(groups), equal=engine.lockstep):
            engine.forward_backward([row])
        norm = engine.optimizer_step(denominator_of(groups)).grad_norm
        trained.append((before, saved_state(engine), norm))
    (start, adamw, norm), (same_start, state, same_norm) = trained
    assert same_bits(start, same_start)
    shapes = AutoModelForCausalLM.from_pretrained(session.folder / "policy")
    with torch.no_grad():
        for n, p in shapes.named_parameters():
            p.copy_(start[n].view(p.shape))
            p.grad = (of_kind(adamw, "exp_avg")[n] / 0.1).view(p.shape)  # 1 - beta_1
    make = {"muon": plain_muon, "adam8bit": plain_adamw}[name]  # the first step's moments are exact
    for optimizer in make(shapes):
        optimizer.step()
    plain = {n: p.detach().view(-1) - start[n] for n, p in shapes.named_parameters()}
    moved = {n: v - start[n] for n, v in of_kind(state, "master").items()}
    return {"moved": relative_error(moved, plain), "norms": [norm, same_norm]}


def check_other_stage(session: Session, name: str, stage: int, other: int) -> Results:
    """A checkpoint of one ZeRO stage read by another, and by an engine with another optimizer."""
    settings = SETTINGS[name] | ADAM
    collectives = Collectives(Ranks.data_parallel(session.rank, session.size))
    folder = session.folder / f"from-{name}-{stage}-{other}"
    engine = session.engine(stage, **settings)
    for seed in (0, 1):
        session.train(engine, seed)
    Checkpoints(folder, 1, engine, collectives, background=False).save(2, {})
    results: Results = {"saved": len(of_kind(saved_state(engine), "step"))}
    for case, changed in (
        ("stage", session.engine(other, **settings)),
        ("optimizer", session.engine(stage, **ADAM)),
    ):
        fresh = saved_state(changed)
        try:
            Checkpoints(folder, 1, changed, collectives, background=False).load_latest()
            results[case] = ""
        except ValueError as error:
            results[case] = str(error)
        loaded = saved_state(changed)
        results[f"{case}_equal"] = same_bits(saved_state(engine), loaded)
        results[f"{case}_unchanged"] = same_bits(fresh, loaded)
    return results


def check_lora(session: Session, name: str, stage: int) -> Results:
    """A first step from ``B = 0``, where the gradient of ``A`` is zero: adapters alone move."""
    settings = SETTINGS[name] | UPDATES | {"weight_decay": 0.0}
    config = session.config(stage, "fp32", settings)
    model = config.model.model_copy(update={"lora": LoraConfig(rank=3, alpha=7.0)})
    engine = DeepSpeedEngine(config.model_copy(update={"model": model}))
    named = dict(engine._policy.model.named_parameters())
    frozen = [p for p in named.values() if not p.requires_grad]
    before = copy_of(engine._local(frozen))
    start = of_kind(saved_state(engine), "master")
    engine.begin_batch()
    (groups,) = slices(1)
    for row in session.share(rows_of(groups), equal=engine.lockstep):
        engine.forward_backward([row])
    engine.optimizer_step(denominator_of(groups))
    state = saved_state(engine)
    moved = {n: v - start[n] for n, v in of_kind(state, "master").items()}
    inner = engine._engine.optimizer.optimizer
    return {
        "frozen_unchanged": all(map(torch.equal, engine._local(frozen), before)),
        "trained": sorted(moved),
        "rms": {n: float(v.pow(2).mean().sqrt()) for n, v in moved.items() if "lora_B" in n},
        "of_a": max(float(v.abs().max()) for n, v in moved.items() if "lora_A" in n),
        "has_adamw": isinstance(inner, MuonWithAdamW) and inner.adamw is not None,
    }


def check_shared_weights(session: Session, stage: int) -> Results:
    """Every rank serves the same weights after Muon's steps."""
    engine = session.engine(stage, **SETTINGS["muon"] | ADAM)
    for seed in (0, 1):
        session.train(engine, seed)
    held = [p.detach() for p in engine._policy.parameters()]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, held)
    return {"same": all(torch.equal(a, b) for a, b in zip(gathered[0], held, strict=True))}


def cases(session: Session) -> dict[str, Callable[[], Results]]:
    """By name; every rank runs all of them in this order."""
    listed: dict[str, Callable[[], Results]] = {}

    def add(name: str, check: Callable[..., Results], *args: Any, **settings: Any) -> None:
        listed[name] = partial(check, session, *args, **settings)

    for name in installed():
        for max_grad_norm in (MAX_GRAD_NORM, 0.0):
            # of 8-bit moments the layout decides, which is the engine's
            expected = None if name == "adam8bit" else reference(session, name, [], max_grad_norm)
            for stage in STAGES[name] if max_grad_norm else (1,):
                case = f"{name}/{stage}/{'clipped' if max_grad_norm else 'unclipped'}"
                check = partial(check_exact_steps, session, name, stage, max_grad_norm, expected)
                listed[f"steps/{case}"] = check
        if session.size == 1:
            add(f"undivided/{name}", check_undivided, name, 1, expected)
        if name == "muon" and session.size == 1:
            add("rounded/muon", check_steps, name, 1, 0.0, expected)
        if name == "adamw":
            continue
        for stage in STAGES[name]:
            for dtype in ("fp32", "bf16") if stage > 0 else ("fp32",):
                case = f"{name}/{stage}/{dtype}"
                add(f"resume/{case}", check_resume, stage, dtype, optimizer=name)
                if dtype == "bf16":
                    add(f"bf16/{name}/{stage}", check_bf16, name, stage)
            if session.size == 1:
                add(f"discard/{name}/{stage}", check_discard, stage, "fp32", optimizer=name)
                add(f"lora/{name}/{stage}", check_lora, name, stage)
        for stage, other in ((0, 2), (2, 1)):
            add(f"other/{name}/{stage}-{other}", check_other_stage, name, stage, other)
    for stage in STAGES["muon"]:
        add(f"shared/{stage}", check_shared_weights, stage)
    return listed


def run(folder: Path, only: Sequence[str]) -> None:
    session = Session(folder)
    results: dict[str, Results] = {}
    for name, check in cases(session).items():
        if only and not any(name.startswith(each) for each in only):
            continue
        gc.freeze()  # DeepSpeed collects garbage for its memory statistics
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
    run(Path(arguments[0]), arguments[1:])
