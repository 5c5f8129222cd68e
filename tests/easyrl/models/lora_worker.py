"""Trains adapters with ``DeepSpeedEngine`` in one or several processes; see test_lora_engine.py.

``python lora_worker.py FOLDER PHASE``, or under the launcher, with a folder that
``lora_cases.prepare`` filled. Each rank leaves ``PHASE-rank*.json``. Phases:

- ``quick`` and ``every`` (two ranks): gradients, frozen models, what a step changes; checkpoints
- ``resume`` (one rank): loads those of ``every``
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor

from easyrl.config import Config
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.engines.deepspeed.state import optimizer_pieces
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from tests.easyrl.engines.engine_cases import MAX_GRAD_NORM, denominator, relative_error, streamed
from tests.easyrl.engines.engine_worker import ADAM, SGD, SGD_SCALE, Session, num_changed, same_bits
from tests.easyrl.models.lora_cases import EVERY, LORA, QUICK, Gold, dense_gold, load, model_config

Results = dict[str, Any]
Weights = dict[str, Tensor]


class LoraSession(Session):
    """Engines of a policy with an adapter, whose values peft wrote."""

    model_settings: Results = {}

    @cached_property
    def gold(self) -> Gold:
        return dense_gold(self.folder, MAX_GRAD_NORM)

    def config(self, stage: int, dtype: str, trainer: Results, model: str = "base") -> Config:
        config = super().config(stage, dtype, trainer, "base")
        return config.model_copy(update={"model": self.model(dtype, **self.model_settings)})

    def model(self, dtype: str, **settings: Any) -> Any:
        return model_config(self.folder, dtype=dtype, **settings)

    def lora_engine(self, stage: int, dtype: str = "fp32", **trainer: Any) -> DeepSpeedEngine:
        config = self.config(stage, dtype, trainer)
        return DeepSpeedEngine(
            config, load_model=lambda: load(config.model, self.folder / "adapter")
        )

    def fresh_engine(self, stage: int, dtype: str, **trainer: Any) -> DeepSpeedEngine:
        """With ``B`` zero, as a run begins."""
        return DeepSpeedEngine(self.config(stage, dtype, trainer))

    def checkpoints(self, engine: DeepSpeedEngine, name: str) -> Checkpoints:
        return Checkpoints(
            self.folder / name,
            2,
            engine,
            Collectives(Ranks.data_parallel(self.rank, self.size)),
            False,
        )


def weights(engine: DeepSpeedEngine, kind: Any = "full") -> Weights:
    """Rank 0: all; other ranks: nothing."""
    found = {name: tensor.clone() for name, tensor in engine.named_weights(kind)}
    return found if engine.ranks.rank == 0 else {}


def base_hash(engine: DeepSpeedEngine) -> str:
    """Of what this rank holds of the frozen parameters, the old policy's adapter aside."""
    named = engine._policy.model.named_parameters()
    frozen = [p for name, p in named if ".lora_" not in name]
    assert frozen and not any(p.requires_grad for p in frozen)
    return _hash(engine._local(frozen))


def state_hash(engine: DeepSpeedEngine) -> str:
    """Of this rank's share of what a checkpoint holds."""
    pieces = sorted(engine.snapshot().pieces, key=lambda piece: (piece.key, piece.start))
    return _hash([piece.values for piece in pieces])


def _hash(tensors: list[Tensor]) -> str:
    digest = blake3()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_gradient(session: LoraSession, stage: int, dtype: str) -> Results:
    """One SGD-like step, off which the clipped gradient of the adapters can be read."""
    gold = session.gold
    engine = session.lora_engine(stage, dtype, **SGD)
    before, base = weights(engine, "adapter"), base_hash(engine)
    for row in session.share(streamed("token"), equal=engine.lockstep):
        engine.forward_backward([row])
    result = engine.optimizer_step(denominator("token"))
    after = weights(engine, "adapter")
    return {
        "gradient": relative_error(
            {n: (before[n].double() - after[n].double()) / SGD_SCALE for n in before},
            {n: gold.gradients[n] for n in before},
        ),
        "norm": abs(result.grad_norm - gold.grad_norm) / gold.grad_norm,
        "clipped": gold.grad_norm > MAX_GRAD_NORM,
        "base_unchanged": base_hash(engine) == base,
    }


def check_recomputed(session: LoraSession, stage: int, dtype: str) -> Results:
    """The gradient where layers and projection compute again in the backward what ZeRO-3 has let go
    of."""
    found = {}
    for checkpointing, projection in (("layer", "recompute"), ("selective", "same_pass")):
        settings = {"activation_checkpointing": checkpointing, "logprob_backward": projection}
        with mock.patch.object(session, "model_settings", settings):
            found[checkpointing] = check_gradient(session, stage, dtype)
    return found


def check_behaviour(session: LoraSession, stage: int, dtype: str) -> Results:
    """Frozen models, weights and state around steps, the first from ``B = 0``."""
    engine = session.fresh_engine(stage, dtype, **ADAM)  # with a lagged old policy
    probe = streamed("token")[0]
    start, base, policy = weights(engine), base_hash(engine), engine.logprobs(probe)
    at_start = engine._tri_model.frozen_logprobs(probe)
    session.train(engine)
    between = engine.logprobs(probe)
    with no_gradient_buffers(engine):
        session.train(engine, seed=1)
    now = engine._tri_model.frozen_logprobs(probe)
    trained, logprobs = weights(engine), engine.logprobs(probe)
    with engine.perturbed_weights():
        perturbed, moved = weights(engine), float((engine.logprobs(probe) - logprobs).abs().mean())
    with engine.perturbed_weights("adapter"):
        apart, below = weights(engine), weights(engine, "base")
        apart_moved = float((engine.logprobs(probe) - logprobs).abs().mean())
    restored = same_bits(weights(engine), trained)
    elements = sum(p.values.numel() for p in _masters(engine))
    name = f"{stage}-{dtype}"
    session.checkpoints(engine, name).save(2, {"step": 2})
    saved, saved_old = state_hash(engine), now.old_policy
    session.train(engine, seed=2)
    straight = state_hash(engine)
    loaded = session.fresh_engine(stage, dtype, **ADAM)
    session.checkpoints(loaded, name).load_latest()
    results = {
        "reference_is_policy": float((at_start.reference.cpu() - policy).abs().max()),
        "old_is_policy": float((at_start.old_policy.cpu() - policy).abs().max()),
        "reference_moved": float((now.reference - at_start.reference).abs().max()),
        "old_is_the_policy_before": float((now.old_policy.cpu() - between).abs().max()),
        "policy_moved": float((logprobs - between).abs().max()),
        "base_unchanged": base_hash(engine) == base,
        "changed": sorted(n for n in start if not torch.equal(start[n], trained[n])),
        "unperturbed": len(trained) - num_changed(trained, perturbed),
        "perturbation_moved": moved,
        "adapter_perturbed": sorted(n for n in apart if not torch.equal(apart[n], trained[n])),
        "adapter_perturbation_moved": apart_moved,
        "adapter_restored": restored,
        "below_is_the_start": same_bits(below, start),
        "master_elements": elements,
        "weights": _hash(list(trained.values())),
        "loaded": state_hash(loaded) == saved,
        "loaded_weights": same_bits(weights(loaded), trained),
        "loaded_old": torch.equal(loaded._tri_model.frozen_logprobs(probe).old_policy, saved_old),
    }
    session.train(loaded, seed=2)
    return results | {"continued": state_hash(loaded) == straight}


def _masters(engine: DeepSpeedEngine) -> list[Any]:
    pieces = optimizer_pieces(engine._engine.optimizer, engine._shards())
    return [piece for piece in pieces if piece.key.startswith("master/")]


@contextmanager
def no_gradient_buffers(engine: DeepSpeedEngine) -> Iterator[None]:
    """Fails if a frozen parameter gets a gradient in a backward."""
    frozen = [p for p in engine._policy.parameters() if not p.requires_grad]
    backward = engine._engine.backward

    def watched(loss: Tensor) -> None:
        backward(loss)
        assert all(p.grad is None for p in frozen)

    with mock.patch.object(engine._engine, "backward", watched):
        yield


def check_updates(session: LoraSession, stage: int, dtype: str) -> Results:
    """Two updates of a batch: the second sees the batch's own policy as the old one."""
    engine = session.lora_engine(stage, dtype, updates_per_batch=2, learning_rate=1e-2)
    probe = streamed("token")[0]
    policy = engine.logprobs(probe)
    found = []
    engine.begin_batch()
    for seed in (0, 1):
        skipped = engine._tri_model.frozen_logprobs(probe).old_policy is None
        session.train(engine, seed=seed)
        old = engine._tri_model.frozen_logprobs(probe).old_policy
        found.append({"skipped": skipped, "old": float((old.cpu() - policy).abs().max())})
    moved = float((engine.logprobs(probe) - policy).abs().max())
    return {"updates": found, "moved": moved}


def check_resumed(session: LoraSession, stage: int, dtype: str) -> Results:
    engine = session.fresh_engine(stage, dtype, **ADAM)
    session.checkpoints(engine, f"{stage}-{dtype}").load_latest()
    pieces = {p.key: p.values for p in engine.snapshot().pieces}
    saved = weights(engine)
    other = session.model(dtype, lora=LORA.model_copy(update={"rank": LORA.rank + 1}))
    config = session.config(stage, dtype, ADAM).model_copy(update={"model": other})
    try:
        session.checkpoints(DeepSpeedEngine(config), f"{stage}-{dtype}").load_latest()
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    return {
        "weights": _hash(list(saved.values())),
        "kinds": sorted({key.partition("/")[0] for key in pieces}),
        "only_adapters": all(".lora_" in key for key in pieces),
        "refusal": refusal,
    }


CHECKS = {
    "gradient": check_gradient,
    "recomputed": check_recomputed,
    "updates": check_updates,
    "behaviour": check_behaviour,
}


def run(folder: Path, phase: str) -> None:
    session = LoraSession(folder)
    results: Results = {}

    def add(name: str, check: Any, *arguments: Any) -> None:
        gc.freeze()
        started = time.monotonic()
        print(f"rank {session.rank}: {name}", flush=True)  # says where a launch that hung was
        results[name] = check(session, *arguments)
        results[name]["seconds"] = time.monotonic() - started

    if phase == "resume":
        for stage, dtype in EVERY["behaviour"]:
            add(f"behaviour/{stage}/{dtype}", check_resumed, stage, dtype)
    else:
        for kind, cases in {"quick": QUICK, "every": EVERY}[phase].items():
            for stage, dtype in cases:
                add(f"{kind}/{stage}/{dtype}", CHECKS[kind], stage, dtype)
    (folder / f"{phase}-rank{session.rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    run(Path(arguments[0]), arguments[1])
