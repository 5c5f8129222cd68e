"""The two sides of ``benchmarks.embedded_server``: a server process, and ``generate`` in place."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import torch
from transformers import AutoModelForCausalLM

from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess


@dataclass(frozen=True)
class Work:
    """What both sides are asked for."""

    num_groups: int
    group_size: int
    prompt: int  # tokens
    response: int  # tokens
    seed: int

    def prompts(self) -> np.ndarray:
        """Digits, int64 [groups, prompt]; each seed has its own, so that none is known."""
        rng = np.random.default_rng(self.seed)
        return rng.integers(8, 18, (self.num_groups, self.prompt))


@dataclass(frozen=True)
class Seconds:
    wall: float
    server: float  # processor time
    client: float


class Server:
    """``easyrl serve`` with one torch thread, and a client that only keeps the bytes."""

    def __init__(self, model: Path, max_num_seqs: int) -> None:
        options = ["--num-threads=1", "--dtype=float32", f"--max-num-seqs={max_num_seqs}"]
        self._process = EmbeddedServerProcess(model, options)

    def close(self) -> None:
        self._process.close()

    async def run(self, work: Work) -> Seconds:
        """Raises ``ValueError`` if an answer does not have all tokens."""
        settings = {
            "n": work.group_size,
            "max_tokens": work.response,
            "min_tokens": work.response,
            "logprobs": 0,
        }
        bodies = [
            orjson.dumps(
                {"token_ids": prompt.tolist(), "sampling_params": {**settings, "seed": number}}
            )
            for number, prompt in enumerate(work.prompts())
        ]
        url = f"{self._process.url}/inference/v1/generate"
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def ask(body: bytes) -> bytes:
                async with session.post(url, data=body) as response:
                    response.raise_for_status()
                    return await response.read()

            before = self._processor_s(), time.process_time()
            start_s = time.perf_counter()
            answers = await asyncio.gather(*map(ask, bodies))
            wall_s = time.perf_counter() - start_s
            server_s, client_s = self._processor_s() - before[0], time.process_time() - before[1]
        for answer in answers:
            lengths = [len(choice["token_ids"]) for choice in orjson.loads(answer)["choices"]]
            if lengths != [work.response] * work.group_size:
                raise ValueError(f"the server answered with responses of {lengths} tokens")
        return Seconds(wall_s, server_s, client_s)

    def _processor_s(self) -> float:
        """Of all threads of the server, since its start."""
        fields = (
            Path(f"/proc/{self._process.process.pid}/stat").read_text().rpartition(")")[2].split()
        )
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Generate:
    """``transformers``, in this process."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._num_threads = 0

    def run(self, work: Work, num_threads: int) -> float:
        """Seconds."""
        if num_threads != self._num_threads:
            torch.set_num_threads(num_threads)
            self._num_threads = num_threads
            self.run(Work(1, 2, 2, 4, seed=0), num_threads)  # wakes the threads
        input_ids = torch.from_numpy(work.prompts()).repeat_interleave(work.group_size, 0)
        torch.manual_seed(work.seed)
        start_s = time.perf_counter()
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=True,
            top_k=0,  # all, as the server; by default 50
            min_new_tokens=work.response,
            max_new_tokens=work.response,
        )
        seconds = time.perf_counter() - start_s
        assert output.shape[1] == work.prompt + work.response
        return seconds

    @torch.inference_mode()
    def forwards_s(self, work: Work) -> float:
        """Seconds of the model's forward passes alone, one thread; the fastest of five."""
        torch.set_num_threads(1)
        self._num_threads = 1
        prompts = torch.from_numpy(work.prompts())
        newest = prompts[:, :1].repeat_interleave(work.group_size, 0)
        prefill_s = 0.0
        if work.prompt > 1:
            prefill_s = work.num_groups * _fastest_s(lambda: self._model.base_model(prompts[:1]))
        return prefill_s + work.response * _fastest_s(lambda: self._model(newest, use_cache=False))


def _fastest_s(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        start_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)
