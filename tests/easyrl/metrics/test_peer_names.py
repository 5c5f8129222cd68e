"""The names that are said to be TRL's and verl's are in their sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from easyrl.metrics.names import METRICS
from tests.peers import peer_folder

OF_TRAINER = {"loss", "grad_norm", "learning_rate", "epoch"}  # Hugging Face's, which TRL's extends


def sources(folder: Path, *files: str) -> str:
    return "\n".join((folder / file).read_text() for file in files)


@pytest.mark.parametrize("name", [metric.trl for metric in METRICS if metric.trl])
def test_trl_writes_it(name: str) -> None:
    text = sources(peer_folder("trl"), "trainer/grpo_trainer.py")
    if name in OF_TRAINER:
        text = sources(peer_folder("transformers"), "trainer.py", "trainer_callback.py")
    written = re.sub(r"\{\w+\}", "<reward>", text)
    assert re.search(rf"[\"']{re.escape(name)}[\"']|\.{name} = ", written)


@pytest.mark.parametrize("name", [metric.verl for metric in METRICS if metric.verl])
def test_verl_writes_it(name: str) -> None:
    """Whole, or its last part where ``actor/``, ``critic/`` or another is put before it."""
    text = sources(
        peer_folder("verl"),
        "trainer/ppo/metric_utils.py",
        "trainer/ppo/ray_trainer.py",
        "trainer/ppo/core_algos.py",
        "trainer/ppo/rollout_corr_helper.py",
        "workers/engine_workers.py",
        "workers/utils/losses.py",
    )
    first, _, last = name.partition("/")
    assert f'"{name}"' in text or f'"{last}"' in text and re.search(rf"[\"']{first}/", text)
