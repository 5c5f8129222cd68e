"""The reward ``reward_model`` against real vLLM's pooling route."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
from transformers import PreTrainedModel

from easyrl.rewards.http_request import RequestFailed
from easyrl.rewards.reward_model import reward_model
from easyrl.runtime.machine import free_port
from easyrl.schema import Prompt
from tests.inference_client.tiny_classifier import save_tiny_classifier
from tests.vllm_environment import VLLM_PYTHON, missing_vllm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(missing_vllm() is not None, reason=str(missing_vllm())),
]
START_TIMEOUT_S = 240
TOLERANCE = 1e-4  # fp32 on both sides, other kernels


@contextlib.contextmanager
def vllm_pooling(model: Path, log: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        *(VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--runner", "pooling", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "128", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]),
    ]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | settings,
            start_new_session=True,
        )
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline_s, log.read_text()[-4000:]
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PreTrainedModel, str]]:
    folder = tmp_path_factory.mktemp("reward-model")
    model = save_tiny_classifier(folder / "model", hidden_size=64, head_dim=32)
    with vllm_pooling(folder / "model", folder / "vllm.log") as url:
        yield model, url


def test_vllm_gives_hugging_faces_logits(served):
    model, url = served
    rng = np.random.default_rng(0)
    asked = Prompt(0, rng.integers(0, 256, 5, dtype=np.int32), "1+1?", "2")
    responses = [rng.integers(0, 256, size, dtype=np.int32) for size in (1, 4, 30)]
    found = asyncio.run(reward_model(asked, ["a"] * 3, responses, urls=[url], timeout_s=60.0))
    with torch.inference_mode():
        ids = [torch.tensor([[*asked.token_ids, *response]]).long() for response in responses]
        expected = [model(input_ids=each).logits[0, 0].item() for each in ids]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)
    assert max(expected) - min(expected) > 0.1  # nor is it the sigmoid, which hides what differs


def test_vllm_reads_text_and_chats(served):
    _, url = served
    asked, ids = Prompt(0, np.ones(1, np.int32), "1+1?", "2"), [np.ones(1, np.int32)] * 2
    for kind in ("text", "chat"):
        found = asyncio.run(
            reward_model(asked, ["2", "seven"], ids, urls=[url], timeout_s=60.0, input=kind)
        )
        assert len(found) == 2 and found[0] != found[1]


def test_what_vllm_refuses_is_said_at_once(served):
    _, url = served
    asked, ids = Prompt(0, np.ones(1, np.int32), "1+1?", "2"), [np.ones(200, np.int32)]
    with pytest.raises(RequestFailed, match="/classify answers 400: "):
        asyncio.run(reward_model(asked, ["a"], ids, urls=[url], timeout_s=60.0))
    with pytest.raises(RequestFailed, match="/classify answers 404: "):
        asyncio.run(reward_model(asked, ["a"], ids, urls=[url], timeout_s=60.0, model="other"))
