"""``DeepSpeedEngine`` and the offloaded reference on a CUDA device, with small random models."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="deepspeed is not installed")

from easyrl.config import ModelConfig  # noqa: E402
from easyrl.engines.deepspeed.engine import DeepSpeedEngine  # noqa: E402
from easyrl.engines.deepspeed.initialise import num_elements  # noqa: E402
from easyrl.engines.deepspeed.memory import BUFFERED, bytes_per_parameter  # noqa: E402
from easyrl.kernels.attention.segment_layout import SegmentLayout  # noqa: E402
from easyrl.models.loading import load_policy_model  # noqa: E402
from easyrl.models.offload import OffloadedModel  # noqa: E402
from easyrl.models.tri_model import frozen_model  # noqa: E402
from easyrl.runtime.device_time import DeviceTimer  # noqa: E402
from tests.easyrl.engines.engine_cases import TEMPERATURE, denominator, streamed  # noqa: E402
from tests.easyrl.engines.memory_worker import config  # noqa: E402
from tests.tiny_models import save_tiny_model  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# 84 million parameters
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    save_tiny_model(folder / "model", "qwen3", tied=True, **SHAPE)
    return folder


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize(
    ("stage", "dtype", "offload"),
    [(0, "fp32", False), (1, "bf16", False), (2, "bf16", False), (3, "bf16", False)]
    + [(2, "bf16", True)],
)
def test_the_allocator_holds_what_is_documented(
    folder: Path, stage: Any, dtype: Any, offload: bool
) -> None:
    before = allocated()
    engine = DeepSpeedEngine(config(folder, stage, dtype, offload))
    row = streamed("token")[0]
    engine.forward_backward([row])
    result = engine.optimizer_step(denominator("token"))
    assert not result.skipped and result.grad_norm > 0
    engine.forward_backward([row])
    engine._release_gathered()
    num_parameters = sum(num_elements(p) for p in engine._policy.parameters())
    held = (allocated() - before) / num_parameters
    use = bytes_per_parameter(stage, dtype, 1, offload_optimizer=offload)
    engine._engine.destroy()
    slack = 0.5 + BUFFERED / num_parameters
    assert use.device * 0.99 <= held <= use.device + slack, (held, use)


@pytest.mark.parametrize("stage", [0, 2])
def test_adam_is_the_fused_kernel(folder: Path, stage: int) -> None:
    engine = DeepSpeedEngine(config(folder, stage, "bf16" if stage else "fp32", False))
    optimizer = engine._engine.optimizer
    inner = optimizer if stage == 0 else optimizer.optimizer
    assert inner.defaults["fused"] is True
    engine._engine.destroy()


def test_offloaded_reference_says_the_same_and_holds_two_layers(folder: Path) -> None:
    device = torch.device("cuda", 0)
    model = ModelConfig(path=folder / "model", dtype="bf16", attention="merged")
    rows = [row.to(device) for row in streamed("token")]
    pairs = [(row, SegmentLayout(row.segments)) for row in rows]
    plain = frozen_model(load_policy_model(model).to(device))
    expected = plain.logprobs(pairs, TEMPERATURE)
    whole = sum(p.nbytes for p in plain.module.parameters())
    del plain
    offloaded = OffloadedModel(load_policy_model(model), device)
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):  # again, with buffers that the allocator gives a second time
        got = offloaded.logprobs(pairs, TEMPERATURE)
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine, theirs)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 0.7 * whole, (peak, whole)  # two of five layers, and activations
    assert all(p.device.type == "cpu" and p.is_pinned() for p in offloaded._model.parameters())


def test_a_span_is_the_devices_work() -> None:
    """Within a fifth of what the host measures when it waits for the device."""
    device = torch.device("cuda", 0)
    a = torch.randn(4096, 4096, device=device)

    def work() -> None:
        for _ in range(20):
            a @ a

    work()
    torch.cuda.synchronize()
    start_s = time.monotonic()
    work()
    torch.cuda.synchronize()
    expected_s = time.monotonic() - start_s
    timer = DeviceTimer.of(device)
    start_s = time.monotonic()
    with timer.span():
        work()
    launched_s = time.monotonic() - start_s
    assert launched_s < 0.5 * expected_s  # else this says nothing
    assert timer.total_s() == pytest.approx(expected_s, rel=0.2)
