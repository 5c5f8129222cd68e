"""Checks that need vLLM's Python and no server: run by ``test_plugin_units`` with that interpreter.

``python plugin_checks.py`` prints ``{name: null | text of the failure}`` as JSON in its last line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from blake3 import blake3
from easyrl_vllm import register
from easyrl_vllm.chunk_format import DTYPE_NAMES
from easyrl_vllm.engine import ArtifactInitInfo, EasyRLWeightTransferEngine
from easyrl_vllm.keyed_digests import slice_digest
from easyrl_vllm.nccl import EasyRLNCCLWeightTransferEngine
from easyrl_vllm.proof import BLOCK_COLUMNS, Proof, is_packed, prove, read_packed
from easyrl_vllm.replies import Failure, Guarded
from easyrl_vllm.slices import ServedSlice, Slice
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

CHECKS = {}


def check(function: Any) -> Any:
    CHECKS[function.__name__] = function
    return function


class ShardedModel(nn.Module):
    """Two linear layers, one cut by rows and one by columns for rank ``rank`` of 2."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.up = nn.Linear(4, 3, bias=False)
        self.down = nn.Linear(3, 4, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)
        self.up.weight.weight_loader = self._load_rows
        self.down.weight.weight_loader = self._load_columns
        record_metadata_for_reloading(self)

    def _load_rows(self, param: Tensor, loaded_weight: Tensor) -> None:
        param.data.copy_(loaded_weight.narrow(0, 3 * self.rank, 3))

    def _load_columns(self, param: Tensor, loaded_weight: Tensor) -> None:
        param.data.copy_(loaded_weight.narrow(1, 3 * self.rank, 3))

    def load_weights(self, weights: Any) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            if name not in parameters:
                raise ValueError(f"no weight {name}")
            loader = getattr(parameters[name], "weight_loader", default_weight_loader)
            loader(parameters[name], weight)
            loaded.add(name)
        return loaded


FULL = {
    "up.weight": torch.randn(6, 4),
    "down.weight": torch.randn(4, 6),
    "norm.weight": torch.randn(4),
}
CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(world_size=2),
    model_config=SimpleNamespace(quantization=None, dtype=torch.float32),
)


def built(kind: type, model: nn.Module) -> Any:
    return kind(SimpleNamespace(backend=""), CONFIG, torch.device("cpu"), model)


def updated(model: nn.Module, init: dict, update: dict) -> Any:
    """An engine of ``model`` that has gone through one whole update."""
    engine = built(EasyRLWeightTransferEngine, model)
    engine.init_transfer_engine(engine.parse_init_info(init))
    engine.start_weight_update()
    engine.update_weights(update)
    engine.finish_weight_update()
    return engine


def announced(directory: Path, weights: dict[str, Tensor]) -> tuple[dict, dict]:
    """``init_info`` and ``update_info`` of a one-chunk artifact."""
    (directory / "announcement").write_text(blake3(b"token").hexdigest())
    (directory / "v").mkdir()
    save_file(weights, directory / "v" / "chunk-00000.safetensors")
    chunk = {
        "file": "chunk-00000.safetensors",
        "num_bytes": sum(w.nbytes for w in weights.values()),
        "checksums": {n: blake3(w.numpy().tobytes()).hexdigest() for n, w in weights.items()},
    }
    init = {"run": "r", "token": "token", "root": str(directory), "url": None}
    return init, {"artifact": "v", "chunks": [chunk]}


def raises(kind: type[Exception], text: str, function: Any, *args: Any) -> None:
    try:
        function(*args)
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error}"
    else:
        raise AssertionError(f"no {kind.__name__}")


@check
def backends_are_registered_once_and_lazily() -> None:
    register()
    register()
    registry = WeightTransferEngineFactory._registry
    assert registry["easyrl"]() is EasyRLWeightTransferEngine
    assert registry["easyrl_nccl"]() is EasyRLNCCLWeightTransferEngine
    raises(ModuleNotFoundError, "vllm_ascend", registry["easyrl_hccl"])


@check
def shards_are_updated_and_proven() -> None:
    with tempfile.TemporaryDirectory() as directory:
        init, update = announced(Path(directory), FULL)
        for rank in (0, 1):
            model = ShardedModel(rank)
            engine = updated(model, init, update)
            cut = slice(3 * rank, 3 * rank + 3)
            assert torch.equal(model.up.weight, FULL["up.weight"][cut])
            assert torch.equal(model.down.weight, FULL["down.weight"][:, cut])
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            parameters = dict(model.named_parameters())
            proof = prove_with(engine)
            assert proof.problems == {} and proof.slices.keys() == FULL.keys()
            assert boxes(proof, "up.weight") == [((3 * rank, 0), (3, 4))]
            assert boxes(proof, "down.weight") == [((0, 3 * rank), (4, 3))]
            assert not wrong_names(proof)
            assert proof.bit_for_bit() == FULL.keys()
            assert all(p is parameters[n] for n, p in model.named_parameters())
            assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
            model.down.weight.data[1, 2] += 1e-7 * model.down.weight.data[1, 2].abs().clamp(min=1)
            assert wrong_names(prove_with(engine)) == {"down.weight"}
            engine.shutdown()


@check
def another_ranks_shard_fails_the_proof() -> None:
    with tempfile.TemporaryDirectory() as directory:
        init, update = announced(Path(directory), FULL)
        model = ShardedModel(0)
        engine = updated(model, init, update)
        model.up.weight.data.copy_(FULL["up.weight"][3:])
        assert wrong_names(prove_with(engine)) == {"up.weight"}
        engine.shutdown()


@check
def an_error_in_a_proof_leaves_the_model_as_it_was() -> None:
    with tempfile.TemporaryDirectory() as directory:
        init, update = announced(Path(directory), {"unknown.weight": torch.ones(2)})
        model = ShardedModel(0)
        parameters = dict(model.named_parameters())
        engine = built(EasyRLWeightTransferEngine, model)
        engine.init_transfer_engine(engine.parse_init_info(init))
        raises(ValueError, "unknown.weight", prove_with, engine, {"unknown.weight": torch.ones(2)})
        assert all(p is parameters[n] for n, p in model.named_parameters())
        engine.shutdown()


@check
def the_nccl_engine_takes_artifacts_too() -> None:
    with tempfile.TemporaryDirectory() as directory:
        init, update = announced(Path(directory), FULL)
        model = ShardedModel(1)
        engine = built(EasyRLNCCLWeightTransferEngine, model)
        rendezvous = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 3}
        assert isinstance(engine.parse_init_info(rendezvous), NCCLWeightTransferInitInfo)
        assert isinstance(engine.parse_init_info(init), ArtifactInitInfo)
        raises(ValueError, "surprise", engine.parse_init_info, {"surprise": 1})
        engine.init_transfer_engine(engine.parse_init_info(init))
        engine.start_weight_update()
        engine.update_weights(update)
        engine.finish_weight_update()
        assert torch.equal(model.up.weight, FULL["up.weight"][3:])
        proof = prove_with(engine)
        assert proof.problems == {} and not wrong_names(proof)

        broadcast = {"names": [], "dtype_names": [], "shapes": []}
        engine.start_weight_update()
        raises(RuntimeError, "not initialized", engine.update_weights, broadcast)
        raises(ValueError, "has failed", engine.finish_weight_update)
        engine.start_weight_update()
        engine.update_weights(update)
        raises(ValueError, "begun with artifact 'v'", engine.update_weights, broadcast)
        assert torch.equal(model.up.weight, FULL["up.weight"][3:])
        engine.shutdown()


@check
def a_second_group_replaces_the_first_and_leaves_artifacts_alone() -> None:
    left: list[str] = []
    kept = nccl_engine.worker_init_process_group
    nccl_engine.worker_init_process_group = lambda info, _: SimpleNamespace(
        destroy=lambda: left.append(info.master_address)
    )
    try:
        with tempfile.TemporaryDirectory() as directory:
            init, update = announced(Path(directory), FULL)
            engine = built(EasyRLNCCLWeightTransferEngine, ShardedModel(0))
            engine.parallel_config = None
            engine.init_transfer_engine(engine.parse_init_info(init))
            for address in ("first", "second"):
                rendezvous = {"master_address": address, "master_port": 1}
                rendezvous |= {"rank_offset": 1, "world_size": 3}
                engine.init_transfer_engine(engine.parse_init_info(rendezvous))
            assert left == ["first"]
            engine.start_weight_update()
            engine.update_weights(update)
            engine.finish_weight_update()
            engine.shutdown()
            assert left == ["first", "second"]
    finally:
        nccl_engine.worker_init_process_group = kept


@check
def what_nccl_broadcasts_is_checked_for_completeness() -> None:
    model = ShardedModel(0)
    engine = built(EasyRLNCCLWeightTransferEngine, model)

    def receive(self: Any, info: Any) -> None:
        model.load_weights([(name, FULL[name]) for name in info.names])

    kept = NCCLWeightTransferEngine.receive_weights, torch.accelerator.synchronize
    NCCLWeightTransferEngine.receive_weights = receive
    torch.accelerator.synchronize = lambda: None
    try:
        for names in (["up.weight", "norm.weight"], list(FULL)):
            info = {"names": names, "dtype_names": ["float32"] * len(names)}
            engine.start_weight_update()
            engine.update_weights(info | {"shapes": [list(FULL[n].shape) for n in names]})
            if len(names) < len(FULL):
                raises(ValueError, "down.weight", engine.finish_weight_update)
            else:
                engine.finish_weight_update()
    finally:
        NCCLWeightTransferEngine.receive_weights, torch.accelerator.synchronize = kept
    assert torch.equal(model.down.weight, FULL["down.weight"][:, :3])


@check
def a_session_that_the_worker_closed_is_forgotten() -> None:
    with tempfile.TemporaryDirectory() as directory:
        init, update = announced(Path(directory), FULL)
        model = ShardedModel(0)
        engine = built(EasyRLWeightTransferEngine, model)
        engine.init_transfer_engine(engine.parse_init_info(init))
        engine.start_weight_update()
        raises(ValueError, "unknown_key", engine.update_weights, {"unknown_key": 1})
        engine.start_weight_update()  # the worker has closed the session when update raised
        engine.update_weights(update)
        engine.finish_weight_update()
        assert torch.equal(model.norm.weight, FULL["norm.weight"])
        engine.shutdown()


@check
def packed_weights_read_back_exactly() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rows, columns in ((3, 2), (64, BLOCK_COLUMNS + 32), (96, 32)):
            torch.manual_seed(rows)
            magnitudes = 10.0 ** torch.randint(-30, 30, (rows, columns))
            weight = (torch.randn(rows, columns) * magnitudes).to(dtype)
            weight[0, 0] = -0.0
            layer: Any = nn.Module()
            layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
            dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
            assert layer.weight.numel() in (0, weight.numel())
            if not is_packed(layer, weight):  # bf16 where the processor has no kernel for it
                assert dtype != torch.float32
                assert torch.equal(layer.weight, weight)
                given = layer.cpu_linear(torch.eye(columns, dtype=dtype), weight[:1], None)
                assert torch.equal(given.t(), weight[:1])
                continue
            apply = SimpleNamespace(apply=lambda layer, x, bias: layer.cpu_linear(x, None, bias))
            layer.quant_method = apply
            read = read_packed(layer, weight)
            nonce = bytes(32)
            shown = slice_digest(read, nonce, flushed=True)
            assert shown == slice_digest(weight, nonce, flushed=True)
            assert torch.equal(read, weight)  # by value: -0.0 is 0.0
            weight[-1, -1] = torch.nextafter(weight[-1, -1], torch.tensor(1e38, dtype=dtype))
            assert shown != slice_digest(weight, nonce, flushed=True)


@check
def what_is_read_back_with_flushed_zeros_is_not_shown_bit_for_bit() -> None:
    part = Slice((0,), (1,), "F32")
    plain, packed = ServedSlice(part, "0"), ServedSlice(replace(part, flushed=True), "1", "packed")
    proof = Proof({"plain": [plain], "packed": [packed], "both": [plain, packed], "bad": [plain]})
    proof.problems = {"bad": "is rounded", "absent": "not served"}
    assert proof.bit_for_bit() == {"plain"}


class LoadedWith(nn.Module):
    """One parameter whose loader is ``load(param, weight)``."""

    def __init__(self, shape: tuple[int, ...], load: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape), requires_grad=False)
        self.w.weight_loader = load
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Any) -> None:
        for _, weight in weights:
            self.w.weight_loader(self.w, weight)


def shown_of(model: nn.Module, full: Tensor) -> Any:
    engine = SimpleNamespace(model=model)
    return prove_with(engine, {"w": full})


@check
def views_of_a_tensor_are_found_in_it() -> None:
    """Transposed, cast, copied, reshaped and in parts: the same numbers of the same box."""
    full = torch.randn(4, 6)

    def parts(param: Tensor, weight: Tensor) -> None:
        for i, part in enumerate(weight.chunk(2, dim=1)):
            param.data[3 * i : 3 * i + 3].copy_(part.t())

    def cast(param: Tensor, weight: Tensor) -> None:
        param.data.copy_(weight[1:3].to(torch.float64).contiguous().view(2, 6)[:, 2:])

    def flat(param: Tensor, weight: Tensor) -> None:
        param.data.copy_(weight.view(-1)[6:18])

    cases = [
        ((6, 4), parts, full.t().contiguous(), [((0, 0), (4, 3)), ((0, 3), (4, 3))]),
        ((2, 4), cast, full[1:3, 2:], [((1, 2), (2, 4))]),
        ((12,), flat, full[1:3].reshape(-1), [((1, 0), (2, 6))]),
    ]
    for shape, load, served, expected in cases:
        model = LoadedWith(shape, load)
        model.w.data.copy_(served)
        proof = shown_of(model, full)
        assert boxes(proof, "w") == expected, (boxes(proof, "w"), proof.problems)
        assert not wrong_names(proof, {"w": full})


@check
def what_is_no_box_of_a_tensor_is_a_problem() -> None:
    full = torch.randn(4, 6)
    cases = [
        ((2, 6), lambda param, weight: param.data.copy_(weight[::2]), "rearranged"),
        ((4, 6), lambda param, weight: param.data.copy_(weight * 2), "transformed"),
        ((4, 6), lambda param, weight: param.data.add_(weight), "is changed as it is loaded"),
        ((4, 6), lambda param, weight: param.data.fill_(weight[0, 0].item()), "as a number"),
        ((4, 6), lambda param, weight: param.data[:2].copy_(weight[:2]), "not in the artifact"),
    ]
    for shape, load, text in cases:
        problems = shown_of(LoadedWith(shape, load), full).problems
        assert any(text in problem for problem in problems.values()), (text, problems)


@check
def rows_that_pad_a_tensor_have_to_be_what_its_loader_fills_in() -> None:
    def padded(param: Tensor, weight: Tensor) -> None:
        param.data[:4].copy_(weight)
        param.data[4:].fill_(0)

    full = torch.randn(4, 6)
    model = LoadedWith((6, 6), padded)
    model.w.data.zero_()
    model.w.data[:4].copy_(full)
    proof = shown_of(model, full)
    assert proof.problems == {} and not wrong_names(proof, {"w": full})
    model.w.data[5, 1] = 1e-3
    assert "where padded" in shown_of(model, full).problems["w"]


class Queue:
    """What a worker replied."""

    def __init__(self) -> None:
        self.replies: list[Any] = []

    def dequeue(self, timeout: float | None = None) -> Any:
        return self.replies.pop(0)


class Broadcast:
    """Runs each call in two workers, as vLLM's busy loop does."""

    def __init__(self, workers: list[Any], queues: list[Queue]) -> None:
        self.workers, self.queues = workers, queues

    def enqueue(self, call: Any) -> None:
        method, args, kwargs, _ = call
        for worker, queue in zip(self.workers, self.queues, strict=True):
            try:
                if isinstance(method, bytes):
                    import cloudpickle

                    reply = cloudpickle.loads(method)(worker, *args, **kwargs)
                else:
                    reply = getattr(worker, method)(*args, **kwargs)
                queue.replies.append((WorkerProc.ResponseStatus.SUCCESS, reply))
            except Exception as error:
                queue.replies.append((WorkerProc.ResponseStatus.FAILURE, str(error)))


class Refusing:
    """A worker that refuses updates."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def update_weights(self, update_info: dict) -> None:
        raise ValueError(f"refused by {self.rank}")

    def start_weight_update(self) -> str:
        return f"started {self.rank}"


@check
def a_refusal_leaves_no_reply_behind() -> None:
    from collections import deque

    register()
    queues = [Queue(), Queue()]
    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.is_failed = False
    executor.futures_queue = deque()
    executor.response_mqs = queues
    executor.rpc_broadcast_mq = Broadcast([Refusing(0), Refusing(1)], queues)
    call = executor.collective_rpc
    raises(RuntimeError, "refused by 0", call, "update_weights", None, (), {"update_info": {}})
    assert [queue.replies for queue in queues] == [[], []]
    assert call("start_weight_update") == ["started 0", "started 1"]
    assert isinstance(Guarded("update_weights")(Refusing(0), {}), Failure)


NONCE = bytes(range(32))


def prove_with(engine: Any, weights: dict[str, Tensor] | None = None) -> Any:
    config = VllmConfig()
    config.parallel_config = CONFIG.parallel_config  # type: ignore[assignment]
    asked = FULL if weights is None else weights
    tensors = {n: (DTYPE_NAMES[w.dtype], list(w.shape)) for n, w in asked.items()}
    return prove(engine.model, config, NONCE, tensors)


def boxes(proof: Any, name: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(s.slice.starts, s.slice.sizes) for s in proof.slices.get(name, [])]


def wrong_names(proof: Any, weights: dict[str, Tensor] = FULL) -> set[str]:
    """Tensors of which a slice's digest is not that of the slice."""
    wrong = set(proof.problems)
    for name, answer in proof.slices.items():
        for served in answer:
            ranges = zip(served.slice.starts, served.slice.sizes, strict=True)
            part = weights[name][tuple(slice(a, a + n) for a, n in ranges)]
            if served.digest != slice_digest(part, NONCE, flushed=served.slice.flushed):
                wrong.add(name)
    return wrong


def main() -> None:
    results: dict[str, str | None] = {}
    for name, function in CHECKS.items():
        try:
            function()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    sys.stdout.flush()
    print(json.dumps(results), flush=True)
    os._exit(0)  # vLLM's threads would hold the exit up


if __name__ == "__main__":
    main()
