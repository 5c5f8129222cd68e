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

    prompts: tuple[int, ...]  # tokens of each group's
    group_size: int
    response: int  # tokens
    seed: int

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.group_size

    def token_ids(self) -> list[np.ndarray]:
        """Digits, int64 [prompt] by group; each seed has its own, so that none is known."""
        rng = np.random.default_rng(self.seed)
        return [rng.integers(8, 18, num_tokens) for num_tokens in self.prompts]

    def batches(self) -> list[np.ndarray]:
        """The prompts by length, int64 [groups, prompt] each."""
        prompts = self.token_ids()
        return [
            np.stack([prompt for prompt in prompts if len(prompt) == num_tokens])
            for num_tokens in sorted(set(self.prompts))
        ]


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
            for number, prompt in enumerate(work.token_ids())
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
            self.run(Work((2,), 2, 4, seed=0), num_threads)  # wakes the threads
        torch.manual_seed(work.seed)
        return sum(self._generate(torch.from_numpy(batch), work) for batch in work.batches())

    def _generate(self, prompts: torch.Tensor, work: Work) -> float:
        """Seconds of one batch; ``prompts`` int64 [groups, prompt]."""
        input_ids = prompts.repeat_interleave(work.group_size, 0)
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
        assert output.shape[1] == prompts.shape[1] + work.response
        return seconds

    @torch.inference_mode()
    def forwards_s(self, work: Work) -> float:
        """Seconds of the model's forward passes alone, one thread; the fastest of five."""
        torch.set_num_threads(1)
        self._num_threads = 1
        by_length = {len(prompt): torch.from_numpy(prompt[None]) for prompt in work.token_ids()}
        prefill_s = {
            num_tokens: _fastest_s(lambda prompt=prompt: self._model.base_model(prompt))  # type: ignore[misc]
            for num_tokens, prompt in by_length.items()
            if num_tokens > 1
        }
        newest = next(iter(by_length.values()))[:, :1].repeat_interleave(work.num_sequences, 0)
        step_s = _fastest_s(lambda: self._model(newest, use_cache=False))
        return sum(prefill_s.get(n, 0.0) for n in work.prompts) + work.response * step_s


def _fastest_s(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        start_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)
