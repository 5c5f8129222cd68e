"""One update of ``DeepSpeedEngine`` on a GPU, ZeRO 0 to 3, against plain torch in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="deepspeed is not installed")
pytest.importorskip("pydantic", reason="easyrl's own requirements are not installed")

from easyrl.engines.deepspeed.engine import DeepSpeedEngine  # noqa: E402
from tests.easyrl.engines.engine_cases import (  # noqa: E402
    CLIP,
    MAX_GRAD_NORM,
    TEMPERATURE,
    denominator,
    prepare,
    streamed,
)
from tests.gpu.device import marks  # noqa: E402

pytestmark = marks
RATE = 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("updates")
    prepare(folder)
    return folder


@pytest.mark.parametrize(
    ("stage", "dtype", "tolerance"),
    [(0, "fp32", 1e-4), (1, "fp32", 1e-4), (2, "fp32", 1e-4), (3, "fp32", 1e-4)]
    + [(1, "bf16", 5e-2), (2, "bf16", 5e-2), (3, "bf16", 5e-2)],
)
def test_an_update_is_adamws_of_the_dense_gradient(
    folder: Path, stage: Any, dtype: Any, tolerance: float
) -> None:
    """Recipe and clip as in the CPU tests, the old policy being the policy itself."""
    from easyrl.config.file import validate_config

    config = validate_config(
        {
            "model": {"path": str(folder / "policy"), "dtype": dtype},
            "data": {"files": [str(folder / "prompts.jsonl")]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "rollout": {"temperature": TEMPERATURE, "max_tokens": 16},
            "recipe": {
                "aggregation": "token",
                "kl_coef": 0.0,
                "entropy_coef": 0.0,
                "clip_eps_low": CLIP,
                "clip_eps_high": CLIP,
            },
            "trainer": {
                "zero_stage": stage,
                "learning_rate": RATE,
                "max_grad_norm": MAX_GRAD_NORM,
            },
        }
    )
    expected_norm, expected = plain_update(folder)
    engine = DeepSpeedEngine(config)
    try:
        for row in streamed("token"):
            engine.forward_backward([row])
        result = engine.optimizer_step(denominator("token"))
        assert result.grad_norm == pytest.approx(expected_norm, rel=tolerance)
        agreeing = total = 0
        for name, weight in engine.named_weights():
            assert name in expected, name
            step = RATE if dtype == "fp32" else RATE + 2**-8 * float(expected[name].abs().max())
            error = (weight.double() - expected[name]).abs()
            # Adam's first step is the rate times the gradient's sign: where the gradient is nothing
            # but rounding the sign may differ.
            assert float(error.max()) <= 2.01 * step
            agreeing += int((error < 0.1 * step).sum())
            total += error.numel()
        assert agreeing > 0.9 * total
    finally:
        engine._engine.destroy()


def plain_update(folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The gradient's norm and the weights after one step of torch's AdamW, fp64 on a CPU."""
    import numpy as np
    from transformers import AutoModelForCausalLM

    from easyrl.recipes.estimators import group_advantages
    from tests.easyrl.engines.engine_cases import dense_logprobs, make_groups

    policy = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float64)
    total, trained = torch.zeros((), dtype=torch.float64), 0
    for group in make_groups():
        advantages = group_advantages(group.rewards, "group_std")
        for completion, advantage in zip(group.completions, advantages, strict=True):
            mask = torch.from_numpy(np.asarray(completion.loss_mask))
            logp, _ = dense_logprobs(policy, group.prompt.token_ids, completion.token_ids)
            ratio = torch.exp(logp - logp.detach())
            total = total - (ratio * advantage * mask).sum()
            trained += int(mask.sum())
    (total / trained).backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.0).step()
    return float(norm), {n: p.detach() for n, p in policy.named_parameters()}
